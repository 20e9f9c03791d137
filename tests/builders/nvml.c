#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int of(const char *name) { const char *value = getenv(name); return value ? atoi(value) : 0; }

/* A handle is the number of a GPU plus one. */
int nvmlInitWithFlags(unsigned flags) { return getenv("MADE_UP_GPUS") ? 0 : 9; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "made up"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = of("MADE_UP_GPUS");
    return of("MADE_UP_GPUS") < 0 ? 999 : 0; /* unknown */
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)(index + 1);
    return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    strncpy(name, "NVIDIA H100 80GB HBM3", length);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used) {
    total_free_used[0] = getenv("MADE_UP_GB") ? 1e9 * atof(getenv("MADE_UP_GB")) : 0;
    return total_free_used[0] ? 0 : 3; /* not supported */
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%08lx-5a5a", (long)device - 1);
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = getenv("MADE_UP_CUDA") ? of("MADE_UP_CUDA") : 13000;
    return 0;
}
int nvmlSystemGetDriverVersion(char *version, unsigned length) { strncpy(version, "580.65.06", length); return 0; }
