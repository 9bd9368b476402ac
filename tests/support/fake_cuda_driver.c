// As much of NVIDIA's driver as `tq_ops.cuda.decode` calls; it prints what it is asked for.
// cc -shared -fPIC -o libcuda.so.1 fake_cuda_driver.c
#include <stdio.h>
#include <string.h>

static int cuInit(unsigned flags) { return 0; }
static int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
static int cuDeviceGet(int* device, int number) { return *device = 100 + number, 0; }
static int cuDeviceGetAttribute(int* value, int attribute, int device) {
    return *value = attribute == 97 && device == 100 ? 232448 : -1, 0;
}
static int cuModuleLoadData(void** module, const void* image) {
    printf("load %d\n", !memcmp(image, "\177ELF", 4));
    return *module = (void*)0x11, 0;
}
static int cuModuleGetFunction(void** function, void* module, const char* name) {
    printf("function %p %s\n", module, name);
    return *function = (void*)0x22, 0;
}
static int cuFuncSetAttribute(void* function, int attribute, int value) {
    printf("attribute %p %d %d\n", function, attribute, value);
    return 0;
}
static int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** parameters, void** extra) {
    printf("launch %p %u %u %u %u %u %u %u %p %d ", function, gx, gy, gz, bx, by, bz, shared, stream, extra == 0);
    for (int i = 0; i < 200; i++) printf("%02x", ((const unsigned char*)parameters[0])[i]);
    printf("\n");
    fflush(stdout);
    return 0;
}

int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags, int* status) {
    *function = 0;
#define ENTRY(entry) \
    if (!strcmp(name, #entry)) *function = (void*)entry;
    ENTRY(cuInit)
    ENTRY(cuDriverGetVersion)
    ENTRY(cuDeviceGet)
    ENTRY(cuDeviceGetAttribute)
    ENTRY(cuModuleLoadData)
    ENTRY(cuModuleGetFunction)
    ENTRY(cuFuncSetAttribute)
    ENTRY(cuLaunchKernel)
    if (!strcmp(name, "cuGetProcAddress")) *function = (void*)cuGetProcAddress_v2;
    if (status) *status = !*function;
    return *function ? 0 : 500;
}

int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}
