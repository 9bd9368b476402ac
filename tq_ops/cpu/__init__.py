"""The ops in C++ for CPUs: `build` compiles them, `library` loads them, `ops` is the table."""
