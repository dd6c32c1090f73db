/* A stand-in for NVML with one GPU, for tests alone. What it tells is baked in by -D at compile time.

   TELL_UUID, TELL_NAME, TELL_DRIVER: texts. TELL_MAJOR, TELL_MINOR: the capability. TELL_MEMORY: bytes.
   TELL_COUNT: how many GPUs (all the same one). TELL_INIT: what nvmlInit_v2 returns. TELL_MIG: a UUID of an
   instance of MIG, empty where MIG is off. TELL_SHARED: it has no memory of its own. TELL_LOST: the index of a
   GPU of which LOST_IN (0 handle, 1 name, 2 memory, 3 MIG) answers LOST_CODE; -1 for none. TELL_BUSY: how many
   programs compute on each GPU. */

#include <string.h>

typedef struct { unsigned long long total, free, used; } memory_t;

static int gpu, part, lost;

static int text(const char *from, char *to, unsigned int length)
{
    if (strlen(from) + 1 > length)
        return 7; /* NVML_ERROR_INSUFFICIENT_SIZE */
    strcpy(to, from);
    return 0;
}

int nvmlInit_v2(void) { return TELL_INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "Some Error"; }
int nvmlSystemGetDriverVersion(char *to, unsigned int length) { return text(TELL_DRIVER, to, length); }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = TELL_COUNT; return 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device)
{
    if (index >= TELL_COUNT)
        return 2; /* NVML_ERROR_INVALID_ARGUMENT */
    if ((int)index == TELL_LOST && LOST_IN == 0)
        return LOST_CODE;
    *device = (int)index == TELL_LOST ? &lost : &gpu;
    return 0;
}

int nvmlDeviceGetUUID(void *device, char *to, unsigned int length)
{
    return text(device == &part ? TELL_MIG : TELL_UUID, to, length);
}

int nvmlDeviceGetName(void *device, char *to, unsigned int length)
{
    return device == &lost && LOST_IN == 1 ? LOST_CODE : text(TELL_NAME, to, length);
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory)
{
    if (TELL_SHARED)
        return 3; /* NVML_ERROR_NOT_SUPPORTED */
    if (device == &lost && LOST_IN == 2)
        return LOST_CODE;
    memory->total = TELL_MEMORY;
    memory->free = memory->used = 0;
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned int *count, void *programs)
{
    (void)device, (void)programs;
    int small = *count < TELL_BUSY;
    *count = TELL_BUSY;
    return small ? 7 : 0; /* NVML_ERROR_INSUFFICIENT_SIZE */
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
    *major = TELL_MAJOR;
    *minor = TELL_MINOR;
    return 0;
}

#ifndef BEFORE_MIG
int nvmlDeviceGetMigMode(void *device, unsigned int *now, unsigned int *pending)
{
    *now = *pending = TELL_MIG[0] != 0;
    return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned int *count)
{
    *count = 7;
    return device == &lost && LOST_IN == 3 ? LOST_CODE : 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned int index, void **instance)
{
    if (index)
        return 6; /* NVML_ERROR_NOT_FOUND */
    *instance = &part;
    return 0;
}
#endif
