/* Preloaded into a llama-server, this occupies its GPU with a kernel that computes nothing.

   Each time that the file named by HOLD_GPU_ORDER appears, it is removed, and all of the GPU is
   taken for as many seconds as stand in it: what the server launches then waits. The kernel runs
   in the server's own context, so its use of the GPU is the server's, and a kill ends it. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* A multiprocessor has room for 1536 or 2048 threads. */
enum { THREADS_OF_BLOCK = 512, BLOCKS_OF_MULTIPROCESSOR = 4, MULTIPROCESSOR_COUNT = 16 };

static const char *const SPINS =
    ".version 6.0\n.target sm_60\n.address_size 64\n"
    ".visible .entry spin(.param .u64 given) {\n"
    "  .reg .u64 %now, %until;\n  .reg .pred %early;\n"
    "  ld.param.u64 %until, [given];\n"
    "  mov.u64 %now, %globaltimer;\n"
    "  add.u64 %until, %until, %now;\n"
    "again:\n"
    "  mov.u64 %now, %globaltimer;\n"
    "  setp.lt.u64 %early, %now, %until;\n"
    "  @%early bra again;\n"
    "  ret;\n}\n";

typedef void *Handle;

static void check(int error, const char *call) {
    if (error) {
        fprintf(stderr, "hold_gpu: %s: CUDA error %d\n", call, error);
        _exit(1);
    }
}

#define CALL(name, types, ...) check(((int (*) types)dlsym(cuda, name))(__VA_ARGS__), name)

static void *cuda;
static Handle context, spin, stream;
static int block_count;

/* Before the server's main(): it is ready for orders once the server is. */
static void prepare(void) {
    Handle module;
    int device, multiprocessor_count;
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    check(!cuda, "dlopen");
    CALL("cuInit", (unsigned), 0);
    CALL("cuDeviceGet", (int *, int), &device, 0);
    CALL("cuDeviceGetAttribute", (int *, int, int), &multiprocessor_count, MULTIPROCESSOR_COUNT,
         device);
    CALL("cuDevicePrimaryCtxRetain", (Handle *, int), &context, device); /* the server's own */
    CALL("cuCtxSetCurrent", (Handle), context);
    CALL("cuModuleLoadData", (Handle *, const void *), &module, SPINS);
    CALL("cuModuleGetFunction", (Handle *, Handle, const char *), &spin, module, "spin");
    CALL("cuStreamCreate", (Handle *, unsigned), &stream, 1); /* waits for no other */
    block_count = multiprocessor_count * BLOCKS_OF_MULTIPROCESSOR;
}

static void hold(double seconds) {
    unsigned long long nanoseconds = seconds * 1e9;
    void *arguments[] = {&nanoseconds};
    CALL("cuCtxSetCurrent", (Handle), context);
    CALL("cuLaunchKernel",
         (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle,
          void **, void **),
         spin, block_count, 1, 1, THREADS_OF_BLOCK, 1, 1, 0, stream, arguments, NULL);
    fprintf(stderr, "hold_gpu: for %g s\n", seconds);
}

static void *wait_for_orders(void *path) {
    for (;; usleep(20000)) {
        double seconds;
        FILE *order = fopen(path, "r");
        if (!order)
            continue;
        int read = fscanf(order, "%lf", &seconds);
        fclose(order);
        if (read == 1 && !unlink(path))
            hold(seconds);
    }
    return NULL;
}

__attribute__((constructor)) static void begin(void) {
    pthread_t thread;
    char *path = getenv("HOLD_GPU_ORDER");
    if (!path)
        return;
    prepare();
    check(pthread_create(&thread, NULL, wait_for_orders, path), "pthread_create");
    pthread_detach(thread);
}
