// What CUDA adds to C++, for a kernel that runs on the processor (see cuda_on_host.py). The kernel's source follows.

#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;

namespace on_host {

enum State { READY, SHUFFLE, BARRIER, ENDED, ASKS };
enum Kind { NONE, OUTSIDE, NOT_ALIGNED, INDEX, NOT_REACHED, ENDLESS, DIVISION, MASK, RACE, LOST, ONE_PLACE, BLOCKS };

struct Fiber {
    ucontext_t context;
    State state;
    int line;          // where it waits
    const char* what;  // what it calls there
    unsigned mask;
    int from;          // the lane whose number it wants
    unsigned long long given, got;
    unsigned yes;      // the lanes that gave a number other than 0
    unsigned active;   // the lanes that __activemask named last
};

struct Fault {
    int kind, thread, block, line;
    const char* what;
    int other, other_state, other_line;  // of a barrier or shuffle: a thread that is not there
    const char* other_what;
    unsigned mask;
    int writes;  // 1, 0, or -1 where that is not known
    long long number;
    void* address;
    void* place;  // in the code, from its beginning
    void* other_place;  // of a race: where the other access stands, and whether it writes
    int other_block, other_writes, region;
    int unset_thread, unset_block;  // of the first read of shared memory that nobody had written
    void* unset_place;
    int taken_by, taken_from, taken_line, taken_asked;  // the first number of a lane that its shuffle's mask lacks
    const char* taken_what;
    unsigned taken_mask;
};

static const int LANES = 32, STACK = 128 << 10;
static Fiber fibers[1024];
static ucontext_t scheduler;
static sigjmp_buf out;
static Fault fault;
static int count;
static void (*kernel_of_thread)();

UNSEEN static void stop(int kind) {
    fault.kind = kind;
    fault.thread = running;
    fault.block = blockIdx.x;
    siglongjmp(out, 1);
}

UNSEEN static void tell_race() {
    fault.place = (void*)(size_t)race.now.place, fault.writes = race.now_writes, fault.other = race.before.thread;
    fault.other_place = (void*)(size_t)race.before.place, fault.other_block = race.before.block;
    fault.other_writes = race.before_writes, fault.region = race.region;
    running = race.now.thread;
    const bool lost = race.written_back && !race.now_writes && race.before.from == race.now.place;
    const bool one_place = race.before_writes && race.now_writes && race.before.place == race.now.place;
    stop(race.before.block != race.now.block ? BLOCKS : lost ? LOST : one_place ? ONE_PLACE : RACE);
}

UNSEEN static void wait() {
    __asm__ volatile("" ::: "memory");
    settle();
    const int me = running;
    swapcontext(&fibers[me].context, &scheduler);
    __asm__ volatile("" ::: "memory");
}

// How many threads of the block came with a number that is not 0.
UNSEEN static int barrier(int line, int given = 0, const char* what = "__syncthreads") {
    Fiber& fiber = fibers[running];
    fiber.state = BARRIER, fiber.line = line, fiber.what = what, fiber.given = given != 0;
    wait();
    return (int)fiber.got;
}

UNSEEN static unsigned long long exchange(unsigned mask, unsigned long long given, int from, int line,
                                          const char* what) {
    Fiber& fiber = fibers[running];
    if (!(mask >> running % LANES & 1)) {
        fault.line = line, fault.what = what, fault.mask = mask;
        stop(MASK);
    }
    fiber.state = SHUFFLE, fiber.line = line, fiber.what = what;
    fiber.mask = mask, fiber.given = given, fiber.from = from;
    wait();
    return fiber.got;
}

template <typename Number>
UNSEEN static Number shuffle(unsigned mask, Number number, int from, int line, const char* what) {
    static_assert(sizeof(Number) == 4 || sizeof(Number) == 8, "a shuffle exchanges numbers of 4 or 8 bytes");
    unsigned long long bits = 0;
    memcpy(&bits, &number, sizeof number);
    bits = exchange(mask, bits, from, line, what);
    memcpy(&number, &bits, sizeof number);
    return number;
}

UNSEEN static int segment(int width) { return running % LANES / width * width; }

template <typename Number>
UNSEEN static Number shuffle_xor(int line, unsigned mask, Number number, int distance, int width = LANES) {
    const int lane = running % LANES, from = lane ^ distance;
    return shuffle(mask, number, from < segment(width) + width ? from : lane, line, "__shfl_xor_sync");
}
template <typename Number>
UNSEEN static Number shuffle_down(int line, unsigned mask, Number number, unsigned distance, int width = LANES) {
    const int lane = running % LANES, from = lane + (int)distance;
    return shuffle(mask, number, from < segment(width) + width ? from : lane, line, "__shfl_down_sync");
}
template <typename Number>
UNSEEN static Number shuffle_up(int line, unsigned mask, Number number, unsigned distance, int width = LANES) {
    const int lane = running % LANES, from = lane - (int)distance;
    return shuffle(mask, number, from >= segment(width) ? from : lane, line, "__shfl_up_sync");
}
template <typename Number>
UNSEEN static Number shuffle_from(int line, unsigned mask, Number number, int from, int width = LANES) {
    return shuffle(mask, number, segment(width) + (from & (width - 1)), line, "__shfl_sync");
}
UNSEEN static unsigned ballot(int line, const char* what, unsigned mask, int given) {
    exchange(mask, given != 0, running % LANES, line, what);
    return fibers[running].yes;
}
// The lanes that come to this line together: by the same way since they last waited for each other.
UNSEEN static unsigned lanes_there(int line) {
    fibers[running].state = ASKS, fibers[running].line = line;
    wait();
    return fibers[running].active;
}
UNSEEN static bool answer_lanes(int first, int lanes) {
    bool answered = false;
    for (int lane = 0; lane < lanes; ++lane) {
        if (fibers[first + lane].state != ASKS) continue;
        unsigned there = 0;
        for (int other = lane; other < lanes; ++other) {
            Fiber& fiber = fibers[first + other];
            const bool together = ways[first + other] == ways[first + lane];
            if (fiber.state == ASKS && fiber.line == fibers[first + lane].line && together) there |= 1u << other;
        }
        for (int other = lane; other < lanes; ++other)
            if (there >> other & 1) fibers[first + other].active = there, fibers[first + other].state = READY;
        answered = true;
    }
    return answered;
}
struct WarpWaits {
    int line;
    UNSEEN void operator()(unsigned mask = 0xffffffffu) const {
        exchange(mask, 0, running % LANES, line, "__syncwarp");
    }
};

// The shuffle at which a thread has arrived takes place if all lanes that its mask names are there.
UNSEEN static void try_shuffle(int thread) {
    const int first = thread / LANES * LANES;
    const Fiber& mine = fibers[thread];
    for (int lane = 0; lane < LANES; ++lane) {
        if (!(mine.mask >> lane & 1)) continue;
        if (first + lane >= count) return;
        const Fiber& other = fibers[first + lane];
        if (other.state != SHUFFLE || other.mask != mine.mask || other.line != mine.line) return;
    }
    const unsigned mask = mine.mask;
    unsigned yes = 0;
    for (int lane = 0; lane < LANES; ++lane)
        if (mask >> lane & 1 && fibers[first + lane].given) yes |= 1u << lane;
    for (int lane = 0; lane < LANES; ++lane)
        if (mask >> lane & 1) {
            Fiber& fiber = fibers[first + lane];
            const bool there = mask >> fiber.from & 1;  // otherwise the number is not defined: NaN
            if (!there && !fault.taken_mask) {
                fault.taken_by = first + lane, fault.taken_from = first + fiber.from, fault.taken_mask = mask;
                fault.taken_line = fiber.line, fault.taken_what = fiber.what, fault.taken_asked = fiber.active == mask;
            }
            fiber.got = there ? fibers[first + fiber.from].given : ~0ull, fiber.yes = yes;
        }
    for (int lane = 0; lane < LANES; ++lane)
        if (mask >> lane & 1) fibers[first + lane].state = READY;
    order_lanes(first, mask);
}

UNSEEN static void of_thread() {
    kernel_of_thread();
    settle();
    fibers[running].state = ENDED;
}

UNSEEN static void not_reached(int thread, int other) {
    running = thread;
    fault.line = fibers[thread].line, fault.what = fibers[thread].what, fault.mask = fibers[thread].mask;
    fault.other = other, fault.other_state = other < count ? fibers[other].state : ENDED;
    fault.other_line = other < count ? fibers[other].line : 0;
    fault.other_what = other < count ? fibers[other].what : "";
    stop(NOT_REACHED);
}

// No thread can go on, and some have not ended: the block passes its barrier, or says who is missing.
UNSEEN static void pass_barrier() {
    for (int thread = 0; thread < count; ++thread) {
        const Fiber& mine = fibers[thread];
        if (mine.state != SHUFFLE) continue;
        for (int other = thread / LANES * LANES; other < thread / LANES * LANES + LANES; ++other) {
            const bool there = other < count && fibers[other].state == SHUFFLE && fibers[other].line == mine.line
                && fibers[other].mask == mine.mask;
            if ((mine.mask >> other % LANES & 1) && !there) not_reached(thread, other);
        }
    }
    int first = 0;
    while (fibers[first].state != BARRIER) ++first;
    for (int other = 0; other < count; ++other)
        if (fibers[other].state != BARRIER || fibers[other].line != fibers[first].line) not_reached(first, other);
    int yes = 0;
    for (int thread = 0; thread < count; ++thread) yes += (int)fibers[thread].given;
    ++epoch, ++meetings;
    for (int thread = 0; thread < count; ++thread)
        fibers[thread].state = READY, fibers[thread].got = yes, ways[thread] = meetings;
}

UNSEEN static void run_block(bool descending) {
    const int warps = (count + LANES - 1) / LANES;
    for (;;) {
        for (int number = 0; number < warps; ++number) {
            const int first = (descending ? warps - 1 - number : number) * LANES;
            const int lanes = count - first < LANES ? count - first : LANES;
            for (bool ran = true; ran;) {
                ran = false;
                for (int at = 0; at < lanes; ++at) {
                    const int thread = first + (descending ? lanes - 1 - at : at);
                    if (fibers[thread].state != READY) continue;
                    ran = true;
                    running = thread;
                    threadIdx.x = thread;
                    swapcontext(&scheduler, &fibers[thread].context);
                    if (fibers[thread].state == SHUFFLE) try_shuffle(thread);
                }
                ran = ran || answer_lanes(first, lanes);
            }
        }
        bool ended = true;
        for (int thread = 0; thread < count; ++thread) ended = ended && fibers[thread].state == ENDED;
        if (ended) return;
        pass_barrier();
    }
}

UNSEEN static void on_signal(int number, siginfo_t* info, void* given) {
    const mcontext_t& machine = ((ucontext_t*)given)->uc_mcontext;
    char* place = nullptr;
    fault.writes = -1;
#if defined(__x86_64__)
    place = (char*)machine.gregs[REG_RIP];
    if (number == SIGSEGV || number == SIGBUS) fault.writes = machine.gregs[REG_ERR] >> 1 & 1;
#elif defined(__aarch64__)
    place = (char*)machine.pc;
#endif
    Dl_info library;
    if (dladdr(place, &library)) fault.place = (void*)(place - (char*)library.dli_fbase);
    fault.address = info->si_addr;
    stop(number == SIGPROF ? ENDLESS : number == SIGFPE ? DIVISION : OUTSIDE);
}

struct Where { const char* file; unsigned line, column; };

}  // namespace on_host

// What g++ calls where it has checked an index or an address and found it wrong.
extern "C" UNSEEN void __ubsan_handle_out_of_bounds(void* where, void* index) {
    on_host::fault.line = ((on_host::Where*)where)->line;
    on_host::fault.number = (long long)index;
    on_host::stop(on_host::INDEX);
}
extern "C" UNSEEN void __ubsan_handle_type_mismatch_v1(void* where, void* address) {
    on_host::fault.line = ((on_host::Where*)where)->line;
    on_host::fault.address = address;
    on_host::fault.number = 1ll << *((unsigned char*)where + sizeof(on_host::Where) + sizeof(void*));
    on_host::stop(on_host::NOT_ALIGNED);
}

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __popc(bits) __builtin_popcount(bits)
#define __ffs(bits) __builtin_ffs(bits)
#define __noinline__
#define __constant__ static
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("of_a_block")))
#define __syncthreads() ((void)on_host::barrier(__LINE__))
#define __syncthreads_count(given) on_host::barrier(__LINE__, given, "__syncthreads_count")
#define __syncthreads_or(given) (on_host::barrier(__LINE__, given, "__syncthreads_or") > 0)
#define __syncthreads_and(given) (on_host::barrier(__LINE__, given, "__syncthreads_and") == (int)blockDim.x)
#define __activemask() on_host::lanes_there(__LINE__)
#define __ballot_sync(mask, given) on_host::ballot(__LINE__, "__ballot_sync", mask, given)
#define __any_sync(mask, given) (on_host::ballot(__LINE__, "__any_sync", mask, given) != 0)
#define __all_sync(mask, given) (on_host::ballot(__LINE__, "__all_sync", mask, given) == (unsigned)(mask))
#define __threadfence_block()
#define __threadfence()
#define __syncwarp(...) on_host::WarpWaits{__LINE__}(__VA_ARGS__)
#define __shfl_xor_sync(...) on_host::shuffle_xor(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) on_host::shuffle_down(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) on_host::shuffle_up(__LINE__, __VA_ARGS__)
#define __shfl_sync(...) on_host::shuffle_from(__LINE__, __VA_ARGS__)

extern "C" char __start_of_a_block[], __stop_of_a_block[];
__shared__ int at_least_this __attribute__((used));

static inline double rsqrt(double number) { return 1.0 / sqrt(number); }
static inline float rsqrtf(float number) { return 1.0f / sqrtf(number); }
static inline float __frsqrt_rn(float number) { return 1.0f / sqrtf(number); }
static inline float __fsqrt_rn(float number) { return sqrtf(number); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __int2float_rn(int number) { return (float)number; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float number) { return 1.0f / number; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline float min(float a, float b) { return fminf(a, b); }
static inline unsigned __float_as_uint(float number) { unsigned bits; memcpy(&bits, &number, 4); return bits; }
static inline float __uint_as_float(unsigned bits) { float number; memcpy(&number, &bits, 4); return number; }
#define INLINED __attribute__((always_inline))  // an access then has the line that calls
#define READ_AS_IT_IS(name) \
    template <typename Number> INLINED inline Number name(const Number* at) { return *at; }
READ_AS_IT_IS(__ldg) READ_AS_IT_IS(__ldca) READ_AS_IT_IS(__ldcg) READ_AS_IT_IS(__ldcs) READ_AS_IT_IS(__ldlu)
READ_AS_IT_IS(__ldcv)
#define WRITE_AS_IT_IS(name) \
    template <typename Number> INLINED inline void name(Number* at, Number it) { *at = it; }
WRITE_AS_IT_IS(__stwb) WRITE_AS_IT_IS(__stcg) WRITE_AS_IT_IS(__stcs) WRITE_AS_IT_IS(__stwt)
#define ATOMIC(name, after) \
    template <typename Number, typename More> UNSEEN __attribute__((noinline)) Number name(Number* at, More given) { \
        on_host::seen((void*)at, sizeof(Number), true, true, __builtin_return_address(0)); \
        const Number before = *at, more = (Number)given; \
        *at = after; \
        return before; \
    }
ATOMIC(atomicAdd, before + more) ATOMIC(atomicSub, before - more) ATOMIC(atomicExch, more)
ATOMIC(atomicMax, before > more ? before : more) ATOMIC(atomicMin, before < more ? before : more)
ATOMIC(atomicAnd, before & more) ATOMIC(atomicOr, before | more) ATOMIC(atomicXor, before ^ more)
#define atomicAdd_block atomicAdd

// Numbers of 16 bits, as their bits: rounded to the nearest, ties to even.
struct half_bits { unsigned short bits; };
struct bfloat16_bits { unsigned short bits; };
INLINED static inline float widened(float number) { return number; }
INLINED static inline float widened(half_bits number) {
    const unsigned sign = (number.bits & 0x8000u) << 16, rest = number.bits & 0x7fffu;
    if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest >= 0x400u) return __uint_as_float(sign | ((rest << 13) + 0x38000000u));
    const float small = (float)rest * 5.9604644775390625e-8f;  // 2 to the power of -24
    return sign ? -small : small;
}
INLINED static inline float widened(bfloat16_bits number) { return __uint_as_float((unsigned)number.bits << 16); }
INLINED static inline void narrow(float wide, float& number) { number = wide; }
INLINED static inline void narrow(float wide, half_bits& number) {
    const unsigned bits = __float_as_uint(wide), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    unsigned rest;
    if (size > 0x7f800000u) rest = 0x7e00u;
    else if (size >= 0x477ff000u) rest = 0x7c00u;  // 65520 and more
    else if (size >= 0x38800000u) rest = (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13;
    else rest = (unsigned)rintf(__uint_as_float(size) * 16777216.0f);
    number.bits = (unsigned short)(sign | rest);
}
INLINED static inline void narrow(float wide, bfloat16_bits& number) {
    const unsigned bits = __float_as_uint(wide);
    number.bits = wide == wide ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fffu;
}

namespace {
