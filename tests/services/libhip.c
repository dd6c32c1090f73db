/* A stand-in for libamdhip64 and libhiprtc: answers the calls that T0 makes of HIP and computes on the CPU.
 *
 * It is told by the words of IMAGEFACTORY_TEST_LIBCUDA, as the one for libcuda is:
 *   processor=gfx90a,gfx1100   one device for each; `processor=` is none
 *   properties=old             HIP 5: no hipGetDevicePropertiesR0600 (compiled so: -DOLD)
 *   fail=CALL:CODE
 *   kernel=always|never|wrong  adds whatever was compiled; does nothing; one element off
 *   source=any                 takes every text for HIP
 *   memory=leak                keeps what is freed
 *
 * The name of its devices says what they are. Nothing here is a GPU.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int hipError_t;
enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_IMAGE = 200, NOT_FOUND = 500, COMPILATION = 6 };

static const uint64_t TOTAL = (uint64_t)64 << 30;
static uint64_t held;

static const char *told(const char *key)
{
    static char value[256];
    const char *all = getenv("IMAGEFACTORY_TEST_LIBCUDA");
    size_t length = strlen(key);
    for (const char *at = all; at != NULL && *at != '\0'; at = strchr(at, ' ')) {
        while (*at == ' ')
            at++;
        if (strncmp(at, key, length) == 0 && at[length] == '=') {
            size_t size = strcspn(at + length + 1, " ");
            memcpy(value, at + length + 1, size < sizeof value ? size : sizeof value - 1);
            value[size < sizeof value ? size : sizeof value - 1] = '\0';
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

static hipError_t begin(const char *call)
{
    const char *fail = told("fail");
    size_t length = strlen(call);
    if (fail != NULL && strncmp(fail, call, length) == 0 && fail[length] == ':')
        return (hipError_t)strtol(fail + length + 1, NULL, 10);
    return SUCCESS;
}

#define BEGIN                                \
    do {                                     \
        hipError_t answer = begin(__func__); \
        if (answer != SUCCESS)               \
            return answer;                   \
    } while (0)

/* The processor of a device, NULL for one that is not there. */
static const char *processor(int ordinal)
{
    static char name[64];
    const char *list = told("processor");
    if (list == NULL)
        list = "gfx90a:sramecc+:xnack-";
    for (; *list != '\0'; ordinal--) {
        size_t size = strcspn(list, ",");
        if (ordinal == 0 && size < sizeof name) {
            memcpy(name, list, size);
            name[size] = '\0';
            return name;
        }
        list += size + (list[size] == ',');
    }
    return NULL;
}

const char *hipGetErrorName(hipError_t code) { return code == NO_DEVICE ? "hipErrorNoDevice" : ""; }
const char *hipGetErrorString(hipError_t code) { return code == NO_DEVICE ? "no ROCm-capable device is detected" : ""; }

hipError_t hipInit(unsigned int flags)
{
    BEGIN;
    (void)flags;
    return processor(0) == NULL ? NO_DEVICE : SUCCESS;
}

hipError_t hipRuntimeGetVersion(int *version)
{
    BEGIN;
    *version = 70051831;
    return SUCCESS;
}

hipError_t hipGetDeviceCount(int *count)
{
    BEGIN;
    for (*count = 0; processor(*count) != NULL;)
        ++*count;
    return SUCCESS;
}

hipError_t hipSetDevice(int device) { BEGIN; return processor(device) == NULL ? NO_DEVICE : SUCCESS; }

hipError_t hipDeviceGetName(char *name, int size, int device)
{
    BEGIN;
    snprintf(name, (size_t)size, "stand-in of the tests %d", device);
    return SUCCESS;
}

hipError_t hipDeviceGetUuid(unsigned char *uuid, int device)
{
    BEGIN;
    char text[17];
    snprintf(text, sizeof text, "%016x", 0xfafbfc00 + device);
    memcpy(uuid, text, 16);
    return SUCCESS;
}

hipError_t hipDeviceTotalMem(size_t *bytes, int device)
{
    BEGIN;
    (void)device;
    *bytes = TOTAL;
    return SUCCESS;
}

/* A name, numbers, the processor and more numbers, as both layouts have it. */
#ifdef OLD
hipError_t hipGetDeviceProperties(unsigned char *properties, int device)
#else
hipError_t hipGetDevicePropertiesR0600(unsigned char *properties, int device)
#endif
{
    BEGIN;
    memset(properties, 1, 1600);
    strcpy((char *)properties, "stand-in");
    strcpy((char *)properties + 1160, processor(device));
    return SUCCESS;
}

hipError_t hipDeviceSynchronize(void) { BEGIN; return SUCCESS; }

hipError_t hipMemGetInfo(size_t *rest, size_t *total)
{
    BEGIN;
    *rest = TOTAL - held;
    *total = TOTAL;
    return SUCCESS;
}

#define HEADER 64

hipError_t hipMalloc(void **address, size_t bytes)
{
    BEGIN;
    char *memory = malloc(HEADER + bytes);
    if (memory == NULL)
        return OUT_OF_MEMORY;
    memcpy(memory, &bytes, sizeof bytes);
    held += bytes;
    *address = memory + HEADER;
    return SUCCESS;
}

hipError_t hipFree(void *address)
{
    BEGIN;
    char *memory = (char *)address - HEADER;
    size_t bytes;
    memcpy(&bytes, memory, sizeof bytes);
    if (!is("memory", "leak"))
        held -= bytes;
    free(memory);
    return SUCCESS;
}

hipError_t hipMemcpyHtoD(void *target, const void *source, size_t bytes) { BEGIN; memcpy(target, source, bytes); return SUCCESS; }
hipError_t hipMemcpyDtoH(void *target, const void *source, size_t bytes) { BEGIN; memcpy(target, source, bytes); return SUCCESS; }

/* What was compiled: a text that begins with the processor. */
enum { ADDS = 1, SUBTRACTS = 2 };

hipError_t hipModuleLoadData(void **module, const char *code)
{
    BEGIN;
    const char *own = processor(0);
    size_t length = strcspn(own, ":");
    if (strncmp(code, own, length) != 0 || code[length] != '\n')
        return INVALID_IMAGE;
    intptr_t found = strstr(code, "left[at] + right[at]") ? ADDS : SUBTRACTS;
    *module = (void *)found;
    return SUCCESS;
}

hipError_t hipModuleGetFunction(void **function, void *module, const char *name)
{
    BEGIN;
    if (strcmp(name, "combine") != 0)
        return NOT_FOUND;
    *function = module;
    return SUCCESS;
}

hipError_t hipModuleUnload(void *module) { BEGIN; (void)module; return SUCCESS; }

hipError_t hipModuleLaunchKernel(void *function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                                 unsigned int by, unsigned int bz, unsigned int shared, void *stream, void **parameters,
                                 void **extra)
{
    BEGIN;
    (void)gy, (void)gz, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    const float *left = *(float **)parameters[0], *right = *(float **)parameters[1];
    float *result = *(float **)parameters[2];
    uint32_t count = *(uint32_t *)parameters[3];
    int adds = is("kernel", "always") || (intptr_t)function == ADDS;
    if (is("kernel", "never"))
        return SUCCESS;
    for (uint32_t at = 0; at < count && at < gx * bx; at++)
        result[at] = adds ? left[at] + right[at] : left[at] - right[at];
    if (is("kernel", "wrong"))
        result[count / 2] += 1;
    return SUCCESS;
}

struct program {
    char *source, code[4096];
};

int hiprtcCreateProgram(struct program **made, const char *source, const char *name, int count, void *headers, void *names)
{
    BEGIN;
    (void)name, (void)count, (void)headers, (void)names;
    *made = calloc(1, sizeof **made);
    (*made)->source = strdup(source);
    return SUCCESS;
}

int hiprtcCompileProgram(struct program *program, int count, const char **options)
{
    BEGIN;
    if (count != 1 || strncmp(options[0], "--offload-arch=", 15) != 0)
        return COMPILATION;
    if (strstr(program->source, "imagine") != NULL && !is("source", "any"))
        return COMPILATION;
    snprintf(program->code, sizeof program->code, "%s\n%s", options[0] + 15, program->source);
    return SUCCESS;
}

static const char LOG[] = "error: expected ';' after expression";
int hiprtcGetProgramLogSize(struct program *program, size_t *size) { BEGIN; (void)program; *size = sizeof LOG; return SUCCESS; }
int hiprtcGetProgramLog(struct program *program, char *log) { BEGIN; (void)program; memcpy(log, LOG, sizeof LOG); return SUCCESS; }
int hiprtcGetCodeSize(struct program *program, size_t *size) { BEGIN; *size = strlen(program->code) + 1; return SUCCESS; }
int hiprtcGetCode(struct program *program, char *code) { BEGIN; strcpy(code, program->code); return SUCCESS; }

int hiprtcDestroyProgram(struct program **program)
{
    BEGIN;
    free((*program)->source);
    free(*program);
    *program = NULL;
    return SUCCESS;
}
