/* The floor of "lock to image": one pass over wheels in C libraries, without tar rules, checks or byte code.
 *
 *     cc -O2 floor.c -o floor -lisal -lzstd -lcrypto -pthread
 *     floor FOLDER WORKERS LEVEL < plan
 *
 * The plan has a line `W SIZE PATH` for each wheel and then `M OFFSET PACKED PLAIN METHOD` for each of its
 * members (METHOD 8 is DEFLATE, 0 is stored). A thread takes one wheel at a time, in the plan's order. It
 * hashes the file, inflates each member, hashes it with a header of 512 bytes and its padding as in a tar,
 * compresses this with zstd, hashes the result, and writes it to FOLDER/NUMBER. It prints, for each wheel,
 * `NUMBER SHA256-OF-WHEEL SHA256-OF-LAYER SIZE-OF-LAYER`. Any problem ends it with status 1.
 */
#include <fcntl.h>
#include <isa-l/igzip_lib.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zstd.h>

enum { CHUNK = 256 << 10, BLOCK = 512 };

struct member { size_t offset, packed, plain; int method; };
struct wheel { char path[4096]; size_t size, count; struct member *members; };

static struct wheel *wheels;
static size_t wheel_count, next_wheel;
static const char *folder;
static int level;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void fail(const char *path, const char *problem)
{
    fprintf(stderr, "floor: %s: %s\n", path, problem);
    exit(1);
}

struct layer {
    const char *path;
    int file;
    size_t size;
    EVP_MD_CTX *plain, *packed;
    ZSTD_CCtx *zstd;
    unsigned char *buffer;
};

static void add(struct layer *layer, const void *data, size_t size, ZSTD_EndDirective end)
{
    ZSTD_inBuffer in = {data, size, 0};
    size_t left;
    if (size)
        EVP_DigestUpdate(layer->plain, data, size);
    do {
        ZSTD_outBuffer out = {layer->buffer, CHUNK, 0};
        left = ZSTD_compressStream2(layer->zstd, &out, &in, end);
        if (ZSTD_isError(left))
            fail(layer->path, ZSTD_getErrorName(left));
        EVP_DigestUpdate(layer->packed, layer->buffer, out.pos);
        for (size_t done = 0; done < out.pos;) {
            ssize_t count = write(layer->file, layer->buffer + done, out.pos - done);
            if (count <= 0)
                fail(layer->path, "cannot write");
            done += (size_t)count;
        }
        layer->size += out.pos;
    } while (in.pos < in.size || (end == ZSTD_e_end && left));
}

static void add_member(struct layer *layer, const struct member *member, unsigned char *data, unsigned char *chunk)
{
    static const unsigned char zeros[BLOCK];
    struct inflate_state state;
    size_t plain = 0;
    add(layer, zeros, BLOCK, ZSTD_e_continue);
    if (member->method == 0) {
        add(layer, data, member->packed, ZSTD_e_continue);
        plain = member->packed;
    } else {
        isal_inflate_init(&state);
        state.next_in = data;
        state.avail_in = (uint32_t)member->packed;
        do {
            state.next_out = chunk;
            state.avail_out = CHUNK;
            if (isal_inflate(&state) != ISAL_DECOMP_OK)
                fail(layer->path, "a member is corrupt");
            size_t size = CHUNK - state.avail_out;
            if (!size && state.block_state != ISAL_BLOCK_FINISH)
                fail(layer->path, "a member is truncated");
            add(layer, chunk, size, ZSTD_e_continue);
            plain += size;
        } while (state.block_state != ISAL_BLOCK_FINISH);
    }
    if (plain != member->plain)
        fail(layer->path, "a member has another size");
    add(layer, zeros, (BLOCK - plain % BLOCK) % BLOCK, ZSTD_e_continue);
}

static void print_hash(EVP_MD_CTX *context)
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    EVP_DigestFinal_ex(context, digest, NULL);
    for (int i = 0; i < 32; i++)
        printf("%02x", digest[i]);
}

static void pack(size_t number)
{
    struct wheel *wheel = &wheels[number];
    char path[4096];
    unsigned char *chunk = malloc(CHUNK), *buffer = malloc(CHUNK);
    EVP_MD_CTX *whole = EVP_MD_CTX_new(), *plain = EVP_MD_CTX_new(), *packed = EVP_MD_CTX_new();
    ZSTD_CCtx *zstd = ZSTD_createCCtx();
    if (!chunk || !buffer || !whole || !plain || !packed || !zstd)
        fail(wheel->path, "no memory");
    EVP_DigestInit_ex(whole, EVP_sha256(), NULL);
    EVP_DigestInit_ex(plain, EVP_sha256(), NULL);
    EVP_DigestInit_ex(packed, EVP_sha256(), NULL);
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_compressionLevel, level);
    int in = open(wheel->path, O_RDONLY);
    unsigned char *data = in < 0 ? MAP_FAILED : mmap(NULL, wheel->size, PROT_READ, MAP_PRIVATE, in, 0);
    if (data == MAP_FAILED)
        fail(wheel->path, "cannot read");
    madvise(data, wheel->size, MADV_SEQUENTIAL);
    EVP_DigestUpdate(whole, data, wheel->size);
    snprintf(path, sizeof path, "%s/%zu", folder, number);
    struct layer layer = {wheel->path, open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644), 0, plain, packed, zstd, buffer};
    if (layer.file < 0)
        fail(path, "cannot write");
    for (size_t i = 0; i < wheel->count; i++) {
        const struct member *member = &wheel->members[i];
        if (member->offset > wheel->size || member->packed > wheel->size - member->offset)
            fail(wheel->path, "a member ends behind the file");
        add_member(&layer, member, data + member->offset, chunk);
    }
    memset(chunk, 0, 2 * BLOCK);
    add(&layer, chunk, 2 * BLOCK, ZSTD_e_end);
    if (close(layer.file))
        fail(path, "cannot write");
    munmap(data, wheel->size);
    close(in);
    pthread_mutex_lock(&lock);
    printf("%zu ", number);
    print_hash(whole);
    putchar(' ');
    print_hash(packed);
    printf(" %zu\n", layer.size);
    pthread_mutex_unlock(&lock);
    EVP_MD_CTX_free(whole), EVP_MD_CTX_free(plain), EVP_MD_CTX_free(packed);
    ZSTD_freeCCtx(zstd);
    free(chunk), free(buffer);
}

static void *work(void *unused)
{
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        size_t number = next_wheel++;
        pthread_mutex_unlock(&lock);
        if (number >= wheel_count)
            return NULL;
        pack(number);
    }
}

int main(int argc, char **argv)
{
    char line[8192];
    if (argc != 4)
        fail("usage", "floor FOLDER WORKERS LEVEL");
    folder = argv[1], level = atoi(argv[3]);
    while (fgets(line, sizeof line, stdin)) {
        if (line[0] == 'W') {
            wheels = realloc(wheels, (wheel_count + 1) * sizeof *wheels);
            struct wheel *wheel = &wheels[wheel_count++];
            wheel->count = 0, wheel->members = NULL;
            if (sscanf(line, "W %zu %4095[^\n]", &wheel->size, wheel->path) != 2)
                fail("plan", line);
        } else {
            struct wheel *wheel = &wheels[wheel_count - 1];
            if (!(wheel->count & (wheel->count + 1)))
                wheel->members = realloc(wheel->members, (2 * wheel->count + 2) * sizeof *wheel->members);
            struct member *member = &wheel->members[wheel->count++];
            if (sscanf(line, "M %zu %zu %zu %d", &member->offset, &member->packed, &member->plain, &member->method) != 4)
                fail("plan", line);
        }
    }
    int count = atoi(argv[2]);
    pthread_t *threads = calloc((size_t)count, sizeof *threads);
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
