/* A stand-in for libcuda: answers the calls that T0 makes, computes on the CPU, and lies when it is told to.
 *
 * It is told by the words of IMAGEFACTORY_TEST_LIBCUDA, else by those it was compiled with (LIES):
 *   version=12040          the driver's version
 *   capability=8.0,9.0     one device for each; `capability=` is none
 *   fail=CALL:CODE  hang=CALL  crash=CALL  exit=CALL
 *   kernel=always|never|wrong|overrun|early
 *       adds whatever the PTX says; does nothing; one element off; writes behind the end;
 *       has the sum ready although no kernel ran
 *   ptx=any                takes every text for PTX
 *   memory=leak|fixed      keeps what is freed; always tells the same
 *   mode=N                 the compute mode (2 prohibits all programs)
 *   slice=1                the devices are slices of a GPU (MIG)
 *
 * The name of its devices says what they are. Nothing here is a GPU.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef LIES
#define LIES ""
#endif

typedef int CUresult;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_PTX = 218,
       NOT_FOUND = 500 };

static const uint64_t TOTAL = (uint64_t)16 << 30;
static uint64_t held;

/* The text behind `key=` up to the next blank, NULL where nothing was told. */
static const char *told(const char *key)
{
    static char value[256];
    const char *all = getenv("IMAGEFACTORY_TEST_LIBCUDA");
    size_t length = strlen(key);
    if (all == NULL)
        all = LIES;
    for (const char *at = all; at != NULL && *at != '\0'; at = strchr(at, ' ')) {
        while (*at == ' ')
            at++;
        if (strncmp(at, key, length) == 0 && at[length] == '=') {
            size_t size = strcspn(at + length + 1, " ");
            if (size >= sizeof value)
                size = sizeof value - 1;
            memcpy(value, at + length + 1, size);
            value[size] = '\0';
            return value;
        }
    }
    return NULL;
}

static int is(const char *key, const char *value)
{
    const char *found = told(key);
    return found != NULL && strcmp(found, value) == 0;
}

/* What every call does first. */
static CUresult begin(const char *call)
{
    if (is("hang", call))
        for (;;)
            sleep(1);
    if (is("crash", call))
        abort();
    if (is("exit", call))
        _exit(0);
    const char *fail = told("fail");
    size_t length = strlen(call);
    if (fail != NULL && strncmp(fail, call, length) == 0 && fail[length] == ':')
        return (CUresult)strtol(fail + length + 1, NULL, 10);
    return SUCCESS;
}

#define BEGIN                              \
    do {                                   \
        CUresult answer = begin(__func__); \
        if (answer != SUCCESS)             \
            return answer;                 \
    } while (0)

/* The capability of a device as major * 10 + minor, 0 for a device that is not there. */
static int capability(int ordinal)
{
    const char *list = told("capability");
    if (list == NULL)
        list = "8.0";
    for (; *list != '\0'; list++) {
        char *end;
        long major = strtol(list, &end, 10), minor = strtol(end + 1, &end, 10);
        if (ordinal-- == 0)
            return (int)(major * 10 + minor);
        list = end;
        if (*list == '\0')
            break;
    }
    return 0;
}

CUresult cuInit(unsigned int flags)
{
    BEGIN;
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}

CUresult cuDriverGetVersion(int *version)
{
    BEGIN;
    const char *number = told("version");
    *version = number == NULL ? 12040 : (int)strtol(number, NULL, 10);
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    BEGIN;
    for (*count = 0; capability(*count) != 0;)
        ++*count;
    return SUCCESS;
}

CUresult cuDeviceGet(int *device, int ordinal)
{
    BEGIN;
    *device = ordinal;
    return capability(ordinal) != 0 ? SUCCESS : INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int length, int device)
{
    BEGIN;
    snprintf(name, (size_t)length, "stand-in of the tests %d", device);
    return SUCCESS;
}

static void write_uuid(unsigned char *uuid, int first, int device)
{
    for (int at = 0; at < 16; at++)
        uuid[at] = (unsigned char)(first + at);
    uuid[15] = (unsigned char)device;
    /* Each node of a job has another GPU. */
    const char *meeting = getenv("IMAGEFACTORY_MEETING");
    const char *rank = meeting == NULL ? NULL : strstr(meeting, "\"rank\": ");
    if (rank != NULL)
        uuid[14] = (unsigned char)(uuid[14] + atoi(rank + strlen("\"rank\": ")));
}

CUresult cuDeviceGetUuid(unsigned char *uuid, int device)
{
    BEGIN;
    write_uuid(uuid, 0xf0, device);
    return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    BEGIN;
    write_uuid(uuid, is("slice", "1") ? 0x10 : 0xf0, device);
    return SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device)
{
    BEGIN;
    const char *mode = told("mode");
    *value = attribute == 75   ? capability(device) / 10
             : attribute == 76 ? capability(device) % 10
             : attribute == 20 ? (mode == NULL ? 0 : (int)strtol(mode, NULL, 10))
                               : -1;
    return *value >= 0 ? SUCCESS : INVALID_VALUE;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    BEGIN;
    (void)device;
    *bytes = TOTAL;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(void **context, int device)
{
    BEGIN;
    (void)device;
    *context = &held;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(int device)
{
    BEGIN;
    (void)device;
    return SUCCESS;
}

/* The thread's contexts; what lies below the first is a framework's own. */
static void *contexts[8];
static int depth;

CUresult cuCtxPushCurrent_v2(void *context)
{
    BEGIN;
    if (context == NULL || depth == 8)
        return INVALID_CONTEXT;
    contexts[depth++] = context;
    return SUCCESS;
}

CUresult cuCtxPopCurrent_v2(void **context)
{
    BEGIN;
    if (depth == 0)
        return INVALID_CONTEXT;
    *context = contexts[--depth];
    return SUCCESS;
}

CUresult cuCtxGetCurrent(void **context)
{
    BEGIN;
    *context = depth > 0 ? contexts[depth - 1] : NULL;
    return SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
    BEGIN;
    return SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *rest, size_t *total)
{
    BEGIN;
    *rest = is("memory", "fixed") ? TOTAL / 2 : TOTAL - held;
    *total = TOTAL;
    return SUCCESS;
}

/* Memory of the device: the size, then what the caller sees. */
#define HEADER 64

CUresult cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    BEGIN;
    char *memory = malloc(HEADER + bytes);
    if (memory == NULL)
        return OUT_OF_MEMORY;
    memcpy(memory, &bytes, sizeof bytes);
    held += bytes;
    *address = (uint64_t)(uintptr_t)(memory + HEADER);
    return SUCCESS;
}

CUresult cuMemFree_v2(uint64_t address)
{
    BEGIN;
    char *memory = (char *)(uintptr_t)address - HEADER;
    size_t bytes;
    memcpy(&bytes, memory, sizeof bytes);
    if (!is("memory", "leak"))
        held -= bytes;
    free(memory);
    return SUCCESS;
}

static float *early[3];

CUresult cuMemcpyHtoD_v2(uint64_t address, const void *source, size_t bytes)
{
    BEGIN;
    memcpy((void *)(uintptr_t)address, source, bytes);
    early[0] = early[1];
    early[1] = early[2];
    early[2] = (float *)(uintptr_t)address;
    if (is("kernel", "early") && early[0] != NULL) {
        size_t count;
        memcpy(&count, (char *)early[0] - HEADER, sizeof count);
        for (size_t at = 0; at < count / sizeof(float); at++)
            early[2][at] = early[0][at] + early[1][at];
        early[0] = early[1] = early[2] = NULL;
    }
    return SUCCESS;
}

CUresult cuMemcpyDtoH_v2(void *target, uint64_t address, size_t bytes)
{
    BEGIN;
    memcpy(target, (void *)(uintptr_t)address, bytes);
    return SUCCESS;
}

enum { ADDS = 1, SUBTRACTS = 2 };

CUresult cuModuleLoadDataEx(void **module, const void *image, unsigned int count, int *options, void **values)
{
    BEGIN;
    const char *ptx = image;
    intptr_t found = strstr(ptx, "add.rn.f32") ? ADDS : strstr(ptx, "sub.rn.f32") ? SUBTRACTS : 0;
    if (strstr(ptx, ".version ") == NULL || strstr(ptx, ".target ") == NULL)
        found = 0;
    if (found == 0 && is("ptx", "any"))
        found = ADDS;
    if (found == 0) {
        char *log = NULL;
        size_t size = 0;
        for (unsigned int at = 0; at < count; at++) {
            if (options[at] == 5)
                log = values[at];
            if (options[at] == 6)
                size = (size_t)(uintptr_t)values[at];
        }
        if (log != NULL && size > 0)
            snprintf(log, size, "ptxas: not an instruction that the stand-in knows");
        return INVALID_PTX;
    }
    *module = (void *)found;
    return SUCCESS;
}

CUresult cuModuleGetFunction(void **function, void *module, const char *name)
{
    BEGIN;
    *function = module;
    return strcmp(name, "combine") == 0 ? SUCCESS : NOT_FOUND;
}

CUresult cuModuleUnload(void *module)
{
    BEGIN;
    (void)module;
    return SUCCESS;
}

CUresult cuLaunchKernel(void *function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                        unsigned int by, unsigned int bz, unsigned int shared, void *stream, void **arguments,
                        void **extra)
{
    BEGIN;
    (void)shared, (void)stream, (void)extra;
    const float *left = *(float **)arguments[0], *right = *(float **)arguments[1];
    float *result = *(float **)arguments[2];
    size_t count = *(uint32_t *)arguments[3], threads = (size_t)gx * gy * gz * bx * by * bz;
    int subtracts = (intptr_t)function == SUBTRACTS && !is("kernel", "always");
    if (is("kernel", "never"))
        return SUCCESS;
    for (size_t at = 0; at < count && at < threads; at++)
        result[at] = subtracts ? left[at] - right[at] : left[at] + right[at];
    if (is("kernel", "wrong"))
        result[count / 2] += 1;
    if (is("kernel", "overrun"))
        result[count] = 0;
    return SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char **text)
{
    BEGIN;
    *text = code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : code == INVALID_PTX ? "CUDA_ERROR_INVALID_PTX" : NULL;
    return *text != NULL ? SUCCESS : INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char **text)
{
    BEGIN;
    *text = code == NO_DEVICE     ? "no CUDA-capable device is detected"
            : code == INVALID_PTX ? "a PTX JIT compilation failed"
                                  : NULL;
    return *text != NULL ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags)
{
    BEGIN;
    *address = flags == 0 ? malloc(bytes) : NULL;
    return *address != NULL ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void *address)
{
    BEGIN;
    free(address);
    return SUCCESS;
}
