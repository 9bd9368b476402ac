// PyPTO's logger, replaced while a program is scheduled: it keeps whole the lines that name every task with its attributes.
// PyPTO's own cuts lines at 1,024 characters.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// The pointers through which PyPTO 0.2.0 logs.
struct logger {
    int (*wanted)(int module, int severity, int part);
    void (*host)(int module, int severity, const char *format, ...);
    void (*device)(int module, int severity, const char *format, ...);
    void (*attribute)(_Bool);
};

static const int MACHINE = 3;
static FILE *out;
static struct logger before;

static int wanted(int module, int severity, int part) {
    return part == MACHINE || before.wanted(module, severity, part);
}

static void keep(int module, int severity, const char *format, ...) {
    (void)module;
    (void)severity;
    if (!strstr(format, "func %d %s.") && !strstr(format, "#trace:"))
        return;
    va_list values;
    va_start(values, format);
    // The scheduler's threads log at once: one line ends before the next begins.
    flockfile(out);
    vfprintf(out, format, values);
    fputc('\n', out);
    funlockfile(out);
    va_end(values);
}

static void drop(int module, int severity, const char *format, ...) {
    (void)module;
    (void)severity;
    (void)format;
}

int record_begin(struct logger *logger, const char *path) {
    out = fopen(path, "w");
    if (!out)
        return 1;
    before = *logger;
    logger->device = keep;
    logger->host = drop;
    logger->wanted = wanted;
    return 0;
}

void record_end(struct logger *logger) {
    *logger = before;
    fclose(out);
}
