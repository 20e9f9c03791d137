#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int of(const char *name) { const char *value = getenv(name); return value ? atoi(value) : 0; }

/* A handle is the number of a GPU plus one, times 100, plus that of the part plus one. */
int nvmlInitWithFlags(unsigned flags) { return getenv("MADE_UP_GPUS") ? 0 : 9; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "made up"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = of("MADE_UP_GPUS"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)((index + 1) * 100);
    return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    strncpy(name, "NVIDIA H100 80GB HBM3", length);
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    long number = (long)device / 100 - 1, part = (long)device % 100;
    if (part) snprintf(uuid, length, "MIG-%08lx-%02lx", number, part - 1);
    else snprintf(uuid, length, "GPU-%08lx-5a5a", number);
    return 0;
}
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    if (of("MADE_UP_MIG") < 0) return 999; /* unknown */
    if (!getenv("MADE_UP_MIG")) return 3;  /* not supported */
    *current = *pending = 1;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part) {
    if (of("MADE_UP_MIG") == 99) return 999;
    if (index >= of("MADE_UP_MIG")) return 6; /* not found */
    *part = (void *)((long)device + index + 1);
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = getenv("MADE_UP_CUDA") ? of("MADE_UP_CUDA") : 13000;
    return 0;
}
int nvmlSystemGetDriverVersion(char *version, unsigned length) { strncpy(version, "580.65.06", length); return 0; }
