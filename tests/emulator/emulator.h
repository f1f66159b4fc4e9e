/* CUDA blocks and warps on the host, for tests of the kernels' indexing, order of sums and synchronisation.
 *
 * A kernel source is compiled by g++ with CRUCIBLE_EMULATED defined; common.cuh then includes this file. A thread is a
 * fiber: it runs until it meets a collective (barrier, shuffle, vote, mma), where it waits for the others. One OS
 * thread runs everything, so atomics are plain operations. Blocks run one after another.
 *
 * What kernels may use: threadIdx, blockIdx, blockDim, gridDim; __syncthreads and its _or, _and, _count; __syncwarp;
 * __shfl_sync, _xor, _up, _down; __ballot_sync, __any_sync, __all_sync; atomicAdd, Sub, Max, Min, Or, And, Exch, CAS;
 * __ldg, __ldcg, __byte_perm, __popc, __clz, __ffs, bit casts, __fmul_rn and its like, the vector types; static
 * __shared__ arrays, and dynamic shared memory through CRUCIBLE_SHARED of common.cuh. Inline asm has a twin there:
 * emulator::mma_16816, emulator::copy_async, ….
 *
 * What it catches:
 * - a collective that not all named threads reach, or that lanes reach with different operations: an error that says
 *   who waits where;
 * - a missing barrier, when launched with threads or blocks in another order (Python: order=, seed=): warps advance
 *   together, or, shuffled, each as far as it can;
 * - shared memory read before it was written (each block starts with 0xFF bytes everywhere, NaN as float or half);
 * - asynchronous copies read too early (they happen at the wait for them; until then the target is 0xFF);
 * - reads and writes beyond an argument's array or the dynamic shared memory (guard pages; up to 15 bytes behind an
 *   array whose size is no multiple of 16 are 0xFF and checked for writes afterwards).
 *
 * mma adds products, exact in float32, to the accumulator one after another in k order with float32 roundings. Real
 * tensor cores add several at once: results agree within tolerance, not in bits.
 */
#ifndef CRUCIBLE_EMULATOR_H
#define CRUCIBLE_EMULATOR_H

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <type_traits>
#include <utility>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#define __global__ __attribute__((used, visibility("default")))
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
#define __shared__ static __attribute__((section("emulated_shared")))

using std::isfinite;
using std::isinf;
using std::isnan;

#define EMULATED_VECTOR(T, name)                                                              \
    struct __align__(2 * sizeof(T)) name##2 { T x, y; };                                      \
    struct __align__(4 * sizeof(T)) name##4 { T x, y, z, w; };                                \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTOR(float, float)
EMULATED_VECTOR(int, int)
EMULATED_VECTOR(unsigned, uint)
#undef EMULATED_VECTOR

struct uint3 { unsigned x, y, z; };
typedef uint3 dim3;

extern "C" {
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
extern char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
}
static const int warpSize = 32;

namespace emulator {

enum { MAX_THREADS = 1024, MAX_COPIES = 512, STACK_BYTES = 256 * 1024 };

struct Copy { void* to; const void* from; int bytes; int group; };

struct Fiber {
    void* stack_pointer;
#ifndef __x86_64__
    ucontext_t context;
#endif
    bool alive;
    const char* waits; /* the operation it waits at, or null */
    int copies, groups; /* asynchronous copies pending, groups committed */
    Copy copy[MAX_COPIES];
};

/* A collective of the lanes of ``mask`` of one warp, under way. */
struct Meeting {
    const char* what;
    unsigned mask, arrived;
    const void* in[32];
    void* out[32];
};

struct State {
    Fiber fibers[MAX_THREADS];
    Meeting meetings[MAX_THREADS / 32][8];
    void* scheduler;
#ifndef __x86_64__
    ucontext_t scheduler_context;
#endif
    int threads, alive, current;
    const char* barrier;
    int at_barrier, sum, all, any, result[3];
    void (*call)(void**);
    void** arguments;
    char* stacks;
    char* shared;
    char error[600];
    sigjmp_buf escape;
};
static State state;

#ifdef __x86_64__
/* Saves the callee-saved registers and the stack pointer to *from, continues at ``to``. */
extern "C" void emulator_switch(void** from, void* to);
asm(".text\n.type emulator_switch,@function\nemulator_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
#endif

[[noreturn]] static void fail() { siglongjmp(state.escape, 1); }

static void yield() {
#ifdef __x86_64__
    emulator_switch(&state.fibers[state.current].stack_pointer, state.scheduler);
#else
    swapcontext(&state.fibers[state.current].context, &state.scheduler_context);
#endif
}

static void enter_fiber() {
    state.call(state.arguments);
    Fiber& fiber = state.fibers[state.current];
    fiber.alive = false;
    state.alive--;
    yield();
    abort();
}

static void prepare(int t) {
    Fiber& fiber = state.fibers[t];
    fiber.alive = true;
    fiber.waits = nullptr;
    fiber.copies = fiber.groups = 0;
    char* stack = state.stacks + (size_t)t * STACK_BYTES;
#ifdef __x86_64__
    void** top = (void**)(stack + STACK_BYTES);
    *--top = nullptr; /* alignment: a function is entered with the stack 8 bytes off a multiple of 16 */
    *--top = (void*)enter_fiber;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.stack_pointer = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter_fiber, 0);
#endif
}

static void resume(int t) {
    state.current = t;
    threadIdx.x = t % blockDim.x;
    threadIdx.y = t / blockDim.x % blockDim.y;
    threadIdx.z = t / (blockDim.x * blockDim.y);
#ifdef __x86_64__
    emulator_switch(&state.scheduler, state.fibers[t].stack_pointer);
#else
    swapcontext(&state.scheduler_context, &state.fibers[t].context);
#endif
}

static void wait_at(const char* what) {
    state.fibers[state.current].waits = what;
    yield();
}

/* The last lane of ``mask`` to arrive calls work(in, out): pointers to each lane's operands, null outside ``mask``. */
template <class In, class Out, class Work>
static Out collective(const char* what, unsigned mask, const In& in, Work work) {
    int warp = state.current / 32, lane = state.current % 32;
    Out out{};
    Meeting* meeting = nullptr;
    for (Meeting& m : state.meetings[warp])
        if (m.arrived && (m.mask & mask)) meeting = &m;
    if (!meeting)
        for (Meeting& m : state.meetings[warp])
            if (!m.arrived) { meeting = &m; meeting->what = what; meeting->mask = mask; break; }
    if (!(mask >> lane & 1) || !meeting || meeting->mask != mask || strcmp(meeting->what, what)) {
        snprintf(state.error, sizeof state.error, "block (%u, %u, %u) thread %d: %s with mask %08x, where others of its "
                 "warp are at %s with mask %08x", blockIdx.x, blockIdx.y, blockIdx.z, state.current, what, mask,
                 meeting ? meeting->what : "?", meeting ? meeting->mask : 0);
        fail();
    }
    meeting->arrived |= 1u << lane;
    meeting->in[lane] = &in;
    meeting->out[lane] = &out;
    if (meeting->arrived == mask) {
        const In* ins[32] = {};
        Out* outs[32] = {};
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) { ins[i] = (const In*)meeting->in[i]; outs[i] = (Out*)meeting->out[i]; }
        work(ins, outs);
        meeting->arrived = 0;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) state.fibers[warp * 32 + i].waits = nullptr;
    } else {
        wait_at(what);
    }
    asm volatile("" : : "r"(&out) : "memory"); /* another fiber may have written it */
    return out;
}

static void open_barrier() {
    state.result[0] = state.sum;
    state.result[1] = state.all;
    state.result[2] = state.any;
    for (int t = 0; t < state.threads; t++)
        if (state.fibers[t].waits == state.barrier) state.fibers[t].waits = nullptr;
    state.at_barrier = 0;
}

/* A barrier of all threads that have not returned; the results of the predicate: count, and, or. */
static int barrier(const char* what, int predicate, int which) {
    if (state.at_barrier == 0) {
        state.barrier = what;
        state.sum = state.any = 0;
        state.all = 1;
    } else if (strcmp(state.barrier, what)) {
        snprintf(state.error, sizeof state.error, "block (%u, %u, %u) thread %d: %s, where others are at %s",
                 blockIdx.x, blockIdx.y, blockIdx.z, state.current, what, state.barrier);
        fail();
    }
    state.sum += predicate != 0;
    state.all &= predicate != 0;
    state.any |= predicate != 0;
    state.fibers[state.current].waits = state.barrier;
    if (++state.at_barrier == state.alive) open_barrier();
    else yield();
    return state.result[which];
}

/* ---- twins of inline asm ---- */

static inline float half_to_float(uint16_t bits) {
    _Float16 h;
    memcpy(&h, &bits, 2);
    return (float)h;
}

static inline uint16_t float_to_half(float value) {
    _Float16 h = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
}

struct MmaIn { uint32_t a[4], b[2]; float d[4]; };
struct MmaOut { float d[4]; };

/* mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32, d += a · b. */
static void mma_16816(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
    MmaIn in = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    MmaOut out = collective<MmaIn, MmaOut>("mma", ~0u, in, [](const MmaIn** ins, MmaOut** outs) {
        float A[16][16], B[16][8], C[16][8];
        for (int lane = 0; lane < 32; lane++) {
            int g = lane >> 2, q = lane & 3;
            for (int i = 0; i < 4; i++)
                for (int h = 0; h < 2; h++) {
                    A[g + (i & 1) * 8][q * 2 + h + (i >> 1) * 8] = half_to_float(ins[lane]->a[i] >> (16 * h));
                    if (i < 2) B[q * 2 + h + i * 8][g] = half_to_float(ins[lane]->b[i] >> (16 * h));
                }
            for (int i = 0; i < 4; i++) C[g + (i >> 1) * 8][q * 2 + (i & 1)] = ins[lane]->d[i];
        }
        for (int k = 0; k < 16; k++)
            for (int m = 0; m < 16; m++)
                for (int n = 0; n < 8; n++) C[m][n] += A[m][k] * B[k][n];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                outs[lane]->d[i] = C[(lane >> 2) + (i >> 1) * 8][(lane & 3) * 2 + (i & 1)];
    });
    memcpy(d, out.d, sizeof out.d);
}

/* cp.async: of ``bytes``, ``valid`` come from memory and the others are zero. */
static void copy_async(void* to, const void* from, int bytes, int valid) {
    Fiber& fiber = state.fibers[state.current];
    if (fiber.copies == MAX_COPIES || (uintptr_t)to % bytes || (valid && (uintptr_t)from % bytes)) {
        snprintf(state.error, sizeof state.error, "block (%u, %u, %u) thread %d: %s", blockIdx.x, blockIdx.y,
                 blockIdx.z, state.current, fiber.copies == MAX_COPIES ? "too many asynchronous copies pending"
                 : "asynchronous copy of misaligned addresses");
        fail();
    }
    memset(to, 0xff, bytes);
    if (valid) { volatile char probe = *(const volatile char*)from; (void)probe; }
    fiber.copy[fiber.copies++] = {to, valid ? from : nullptr, bytes, fiber.groups};
}

static void copy_async_commit() { state.fibers[state.current].groups++; }

/* All but the last ``newest`` committed groups are done. */
static void copy_async_wait(int newest) {
    Fiber& fiber = state.fibers[state.current];
    int kept = 0;
    for (int i = 0; i < fiber.copies; i++) {
        const Copy& c = fiber.copy[i];
        if (c.group >= fiber.groups - newest) fiber.copy[kept++] = c;
        else if (c.from) memcpy(c.to, c.from, c.bytes);
        else memset(c.to, 0, c.bytes);
    }
    fiber.copies = kept;
}

/* ---- launching ---- */

template <class T> constexpr char letter() {
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_floating_point_v<T>) return sizeof(T) == 4 ? 'f' : 'd';
    return sizeof(T) == 4 ? 'i' : sizeof(T) == 8 ? 'l' : '?';
}

template <auto kernel> struct Kernel;
template <class... A, void (*kernel)(A...)> struct Kernel<kernel> {
    static constexpr char signature[] = {letter<A>()..., 0};
    template <size_t... I> static void unpack(void** p, std::index_sequence<I...>) { kernel(*(A*)p[I]...); }
    static void call(void** p) { unpack(p, std::index_sequence_for<A...>()); }
};

struct Entry { const char* name; const char* signature; void (*call)(void**); };
#define EMULATED_ENTRY(kernel) {#kernel, emulator::Kernel<&kernel>::signature, emulator::Kernel<&kernel>::call},

static void on_fault(int, siginfo_t* info, void*) {
    snprintf(state.error, sizeof state.error, "block (%u, %u, %u) thread %d: bad address %p", blockIdx.x, blockIdx.y,
             blockIdx.z, state.current, info->si_addr);
    fail();
}

static uint64_t random_state;
static unsigned random_below(unsigned n) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)((random_state >> 33) % n);
}

/* order: 0 ascending, 1 descending, 2 shuffled. */
static void arrange(int* items, int n, int order) {
    for (int i = 0; i < n; i++) items[i] = order == 1 ? n - 1 - i : i;
    for (int i = n - 1; order == 2 && i > 0; i--) std::swap(items[i], items[random_below(i + 1)]);
}

/* Runs those of the threads first … first + count - 1 that do not wait to their next collective; whether any did. */
static bool run_threads(int first, int count, int order) {
    int turn[MAX_THREADS];
    bool moved = false;
    if (first + count > state.threads) count = state.threads - first;
    arrange(turn, count, order);
    for (int i = 0; i < count; i++) {
        Fiber& fiber = state.fibers[first + turn[i]];
        if (!fiber.alive || fiber.waits) continue;
        resume(first + turn[i]);
        moved = true;
        if (!fiber.alive && state.at_barrier && state.at_barrier == state.alive) open_barrier();
    }
    return moved;
}

static void run_block(int order) {
    static int turn[MAX_THREADS];
    state.alive = state.threads;
    state.at_barrier = 0;
    memset(state.meetings, 0, sizeof state.meetings);
    if (__start_emulated_shared) memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
    for (int t = 0; t < state.threads; t++) prepare(t);
    const int warps = (state.threads + 31) / 32;
    while (state.alive) {
        bool moved = false;
        if (order == 2) { /* a warp runs as far as it can before the next */
            arrange(turn, warps, order);
            for (int i = 0; i < warps; i++)
                for (bool again = true; again; moved |= again) again = run_threads(turn[i] * 32, 32, order);
        } else {
            moved = run_threads(0, state.threads, order);
        }
        if (!moved) {
            int n = snprintf(state.error, sizeof state.error, "block (%u, %u, %u) is stuck:", blockIdx.x, blockIdx.y,
                             blockIdx.z);
            for (int t = 0; t < state.threads && n < 500; t++)
                if (state.fibers[t].alive && (t == 0 || !state.fibers[t - 1].alive ||
                                              state.fibers[t - 1].waits != state.fibers[t].waits))
                    n += snprintf(state.error + n, sizeof state.error - n, " thread %d… at %s;", t,
                                  state.fibers[t].waits);
            fail();
        }
    }
}

static void* reserve(size_t bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

} /* namespace emulator */

extern "C" {

/* Memory that ends at a guard page, 0xFF everywhere; 16-byte aligned. */
char* emulator_allocate(size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE), inner = (bytes + 15 + page) / page * page;
    char* base = (char*)emulator::reserve(inner + 2 * page, PROT_NONE);
    if (!base || mprotect(base + page, inner, PROT_READ | PROT_WRITE)) return nullptr;
    memset(base + page, 0xff, inner);
    return base + page + inner - (bytes + 15) / 16 * 16;
}

void emulator_free(char* p, size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE), inner = (bytes + 15 + page) / page * page;
    munmap(p + (bytes + 15) / 16 * 16 - inner - page, inner + 2 * page);
}

/* Whether the 0xFF bytes around an allocation are untouched: those before it, up to its page, and those behind it. */
int emulator_intact(char* p, size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE), inner = (bytes + 15 + page) / page * page;
    unsigned char* end = (unsigned char*)p + (bytes + 15) / 16 * 16;
    for (unsigned char* c = end - inner; c < end; c++)
        if ((c < (unsigned char*)p || c >= (unsigned char*)p + bytes) && *c != 0xff) return 0;
    return 1;
}

/* Runs a kernel over all blocks; null when all went well, else what went wrong. */
const char* emulator_run(void (*call)(void**), void** arguments, const unsigned* grid, const unsigned* block,
                         size_t shared, int order, uint64_t seed) {
    using namespace emulator;
    State& s = state;
    s.error[0] = 0;
    s.call = call;
    s.arguments = arguments;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    s.threads = block[0] * block[1] * block[2];
    random_state = seed * 2 + 1;
    int blocks = grid[0] * grid[1] * grid[2];
    if (!s.stacks) s.stacks = (char*)reserve((size_t)MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE);
    static char alternate[65536];
    s.shared = emulator_allocate(shared);
    int* turn = (int*)malloc(sizeof(int) * (blocks + 1));
    if (!s.stacks || !s.shared || !turn) return "no memory for the emulator";
    arrange(turn, blocks, order);
    struct sigaction action = {}, before_segv, before_bus;
    stack_t stack = {}, before_stack;
    stack.ss_sp = alternate;
    stack.ss_size = sizeof alternate;
    sigaltstack(&stack, &before_stack);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);
    if (!sigsetjmp(s.escape, 1)) {
        for (int i = 0; i < blocks; i++) {
            blockIdx.x = turn[i] % gridDim.x;
            blockIdx.y = turn[i] / gridDim.x % gridDim.y;
            blockIdx.z = turn[i] / (gridDim.x * gridDim.y);
            memset(s.shared, 0xff, shared);
            run_block(order);
        }
        if (!emulator_intact(s.shared, shared))
            snprintf(s.error, sizeof s.error, "a write before or behind the dynamic shared memory");
    }
    sigaction(SIGSEGV, &before_segv, nullptr);
    sigaction(SIGBUS, &before_bus, nullptr);
    sigaltstack(&before_stack, nullptr);
    emulator_free(s.shared, shared);
    free(turn);
    return s.error[0] ? s.error : nullptr;
}
}

/* ---- CUDA's functions ---- */

static inline void __syncthreads() { emulator::barrier("__syncthreads", 0, 0); }
static inline int __syncthreads_count(int p) { return emulator::barrier("__syncthreads_count", p, 0); }
static inline int __syncthreads_and(int p) { return emulator::barrier("__syncthreads_and", p, 1); }
static inline int __syncthreads_or(int p) { return emulator::barrier("__syncthreads_or", p, 2); }
static inline void __syncwarp(unsigned mask = ~0u) {
    emulator::collective<int, int>("__syncwarp", mask, 0, [](const int**, int**) {});
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}

template <class T> struct EmulatedShuffle { T value; int from; };

/* Each lane names the lane it reads. */
template <class T> static T emulated_shuffle(const char* what, unsigned mask, T value, int from) {
    typedef EmulatedShuffle<T> In;
    return emulator::collective<In, T>(what, mask, In{value, from}, [](const In** in, T** out) {
        for (int i = 0; i < 32; i++)
            if (in[i]) {
                const In* source = in[in[i]->from & 31];
                if (source) *out[i] = source->value;
                else memset(out[i], 0xff, sizeof(T));
            }
    });
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    int lane = emulator::state.current % 32;
    return emulated_shuffle("__shfl_sync", mask, value, (lane & ~(width - 1)) + (from & (width - 1)));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    int lane = emulator::state.current % 32, from = lane ^ bits;
    return emulated_shuffle("__shfl_xor_sync", mask, value, (from / width <= lane / width) ? from : lane);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, int by, int width = 32) {
    int lane = emulator::state.current % 32;
    return emulated_shuffle("__shfl_up_sync", mask, value, lane % width >= by ? lane - by : lane);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, int by, int width = 32) {
    int lane = emulator::state.current % 32;
    return emulated_shuffle("__shfl_down_sync", mask, value, lane % width + by < width ? lane + by : lane);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return emulator::collective<int, unsigned>("__ballot_sync", mask, predicate, [](const int** in, unsigned** out) {
        unsigned votes = 0;
        for (int i = 0; i < 32; i++) votes |= in[i] && *in[i] ? 1u << i : 0;
        for (int i = 0; i < 32; i++)
            if (out[i]) *out[i] = votes;
    });
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }

template <class T> struct EmulatedSame { typedef T type; };
#define EMULATED_ATOMIC(name, expression)                                                       \
    template <class T> static inline T name(T* p, typename EmulatedSame<T>::type v) {           \
        T old = *p;                                                                             \
        *p = (expression);                                                                      \
        return old;                                                                             \
    }
EMULATED_ATOMIC(atomicAdd, old + v)
EMULATED_ATOMIC(atomicSub, old - v)
EMULATED_ATOMIC(atomicMax, old > v ? old : v)
EMULATED_ATOMIC(atomicMin, old < v ? old : v)
EMULATED_ATOMIC(atomicOr, old | v)
EMULATED_ATOMIC(atomicAnd, old & v)
EMULATED_ATOMIC(atomicExch, v)
#undef EMULATED_ATOMIC
template <class T>
static inline T atomicCAS(T* p, typename EmulatedSame<T>::type compare, typename EmulatedSame<T>::type v) {
    T old = *p;
    if (old == compare) *p = v;
    return old;
}

template <class To, class From> static inline To emulated_cast(From value) {
    static_assert(sizeof(To) == sizeof(From), "bit cast");
    To to;
    memcpy(&to, &value, sizeof to);
    return to;
}
static inline unsigned __float_as_uint(float v) { return emulated_cast<unsigned>(v); }
static inline int __float_as_int(float v) { return emulated_cast<int>(v); }
static inline float __uint_as_float(unsigned v) { return emulated_cast<float>(v); }
static inline float __int_as_float(int v) { return emulated_cast<float>(v); }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t both = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
    return out;
}
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
#define EMULATED_MINMAX(T)                                            \
    static inline T min(T a, T b) { return b < a ? b : a; }           \
    static inline T max(T a, T b) { return a < b ? b : a; }
EMULATED_MINMAX(int)
EMULATED_MINMAX(unsigned)
EMULATED_MINMAX(long long)
EMULATED_MINMAX(unsigned long long)
#undef EMULATED_MINMAX

#endif
