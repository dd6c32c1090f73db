/* A stand-in for NCCL's libnccl of one rank, beside the stand-in for libcuda, whose memory is the host's.
 *
 * IMAGEFACTORY_TEST_LIBNCCL tells it to lie: `wrong` (one element off), `fails` (an answer of its own),
 * `idle` (success, and nothing done).
 */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, FLOAT32 = 7, SUM = 0, VERSION = 22005 };

static int told(const char *word)
{
    const char *lie = getenv("IMAGEFACTORY_TEST_LIBNCCL");
    return lie != NULL && strcmp(lie, word) == 0;
}

int ncclGetVersion(int *version)
{
    *version = VERSION;
    return SUCCESS;
}

const char *ncclGetErrorString(int code)
{
    return code == SYSTEM_ERROR ? "unhandled system error" : "invalid argument";
}

int ncclCommInitAll(void **communicator, int count, const int *devices)
{
    if (count != 1 || devices[0] != 0)
        return INVALID_ARGUMENT;
    *communicator = malloc(1);
    return SUCCESS;
}

int ncclAllReduce(const float *source, float *target, size_t count, int kind, int operation, void *communicator,
                  void *stream)
{
    if (kind != FLOAT32 || operation != SUM || communicator == NULL || stream != NULL)
        return INVALID_ARGUMENT;
    if (told("fails"))
        return SYSTEM_ERROR;
    if (!told("idle"))
        memcpy(target, source, count * sizeof(float));
    if (told("wrong"))
        target[count / 2] += 1;
    return SUCCESS;
}

int ncclCommDestroy(void *communicator)
{
    free(communicator);
    return SUCCESS;
}
