// Who reached which memory when, for a kernel that runs on the processor (see cuda_on_host.py). cuda_block.h follows.
//
// g++ calls a function before each access, as it does for its own search for races (-fsanitize=thread), and these
// functions stand here. A place in memory remembers who wrote it last and the last two who read it. Two accesses are a
// race if at least one of them writes, they are not both atomic, and nothing orders them: no __syncthreads between two
// threads of a block, no shuffle and no __syncwarp between two lanes of a warp. Blocks are never ordered. A write that
// changes nothing is no race: several threads may store the same number.

#include <link.h>
#include <string.h>
#include <sys/mman.h>

#if __GNUC__ >= 12
#define UNSEEN __attribute__((no_sanitize("thread"), no_sanitize_coverage))
#else
#define UNSEEN __attribute__((no_sanitize("thread")))  // what such a function does is not the kernel's
#endif

namespace on_host {

struct Access { unsigned epoch, clock, place, from; int block; short thread, atomic; };  // from: its own read before
struct Cell { Access wrote, read[2]; };
struct Region { char* begin; char* end; int grain; Cell* cells; };

// Where a template declares shared memory, g++ leaves it among the variables of the file. Then these are the block's,
// if the source declares none of its own: VARIABLES_OF_ALL_BLOCKS is 0.
enum { SHARED, GLOBALS, TENSORS };  // the regions: the block's memory, variables of the file, and tensors behind them
static const int MOST_REGIONS = 64, WARP = 32;
static Region regions[MOST_REGIONS];
static int number_of_regions;
static bool watching;
static int running, block_now;
static unsigned epoch, first_of_block, first_of_launch;  // an epoch ends with a barrier
static unsigned clocks[1024][WARP];  // how far a thread knows of each lane of its warp
static char* base_of_code;

// Which way a thread went since lanes of its warp last waited for each other. Lanes of the same way are together.
static unsigned long long ways[1024], meetings;

struct Race { Access now, before; bool now_writes, before_writes, written_back; int region; char* at; };
static Race race;  // the first of a block, told when the block has ended: another fault may be its cause
static bool raced;
static Access unset;  // the first read of shared memory that nobody had written

static struct { char* at; long bytes; bool differs; char old[64]; Race race; } pending;

// A write that conflicts is judged when it is done: it is a race if it changed something.
UNSEEN static void settle() {
    if (!pending.bytes) return;
    const bool changed = pending.differs || memcmp(pending.at, pending.old, pending.bytes);
    pending.bytes = 0;
    if (!changed) return;
    if (!raced) race = pending.race;
    raced = true;
}

UNSEEN static bool conflict(const Access& before, const Access& now, int region) {
    if (!before.epoch || before.epoch < first_of_launch || (before.atomic && now.atomic)) return false;
    if (before.block != now.block) return region != SHARED && (region != GLOBALS || VARIABLES_OF_ALL_BLOCKS);
    if (before.thread == now.thread || before.epoch < now.epoch) return false;
    if (before.thread / WARP != now.thread / WARP) return true;
    return clocks[now.thread][before.thread % WARP] < before.clock;
}

UNSEEN static void seen(void* where, long bytes, bool writes, bool atomic, void* place) {
    if (!watching) return;
    settle();
    char* const at = (char*)where;
    int which = 0;
    while (which < number_of_regions && !(at >= regions[which].begin && at < regions[which].end)) ++which;
    if (which == number_of_regions) return;
    const Region& region = regions[which];
    Access now = {epoch, clocks[running][running % WARP], (unsigned)((char*)place - base_of_code - 1), 0, block_now,
                        (short)running, (short)atomic};
    bool conflicts = false;
    Race found = {};
    const long last = (at + bytes <= region.end ? at + bytes - 1 : region.end - 1) - region.begin;
    for (long number = (at - region.begin) / region.grain; number <= last / region.grain; ++number) {
        Cell& cell = region.cells[number];
        if ((!writes || atomic) && which == SHARED && cell.wrote.epoch < first_of_block && !unset.epoch) unset = now;
        const Access* before = conflict(cell.wrote, now, which) ? &cell.wrote : nullptr;
        for (int reader = 0; writes && !before && reader < 2; ++reader)
            if (conflict(cell.read[reader], now, which)) before = &cell.read[reader];
        if (before && !conflicts) {
            conflicts = true;
            char* const place_of_cell = region.begin + number * region.grain;
            found = Race{now, *before, writes, before == &cell.wrote, false, which, place_of_cell};
        }
        for (int reader = 0; writes && reader < 2; ++reader) {
            const Access& read = cell.read[reader];
            if (read.thread == now.thread && read.block == now.block && read.epoch == now.epoch) now.from = read.place;
        }
        if (writes) cell.wrote = now;
        else {
            if (cell.read[0].thread != now.thread || cell.read[0].block != now.block) cell.read[1] = cell.read[0];
            cell.read[0] = now;
        }
    }
    const Access& reader = race.now;  // who goes on to write where the other wrote has added to an old number
    if (raced && writes && reader.thread == now.thread && reader.epoch == now.epoch && race.before.place == now.place)
        race.written_back |= race.at >= at && race.at < at + bytes;
    if (!conflicts || raced) return;
    if (!writes) {
        race = found, raced = true;
        return;
    }
    pending.at = at, pending.bytes = bytes, pending.race = found, pending.differs = bytes > (long)sizeof pending.old;
    memcpy(pending.old, at, pending.differs ? 0 : bytes);
}

UNSEEN static void order_lanes(int first, unsigned mask) {
    unsigned all[WARP] = {};
    ++meetings;
    for (int lane = 0; lane < WARP; ++lane)
        for (int other = 0; (mask >> lane & 1) && other < WARP; ++other)
            if (clocks[first + lane][other] > all[other]) all[other] = clocks[first + lane][other];
    for (int lane = 0; lane < WARP; ++lane)
        if (mask >> lane & 1) {
            memcpy(clocks[first + lane], all, sizeof all);
            ++clocks[first + lane][lane];
            ways[first + lane] = meetings;
        }
}

UNSEEN static void begin_block(int block) {
    first_of_block = ++epoch, block_now = block, raced = false;
    memset(clocks, 0, sizeof clocks), memset(ways, 0, sizeof ways);
    for (int thread = 0; thread < 1024; ++thread) clocks[thread][thread % WARP] = 1;
}

UNSEEN static bool watch(char* begin, char* end, int grain) {
    if (number_of_regions == MOST_REGIONS) return false;
    const size_t bytes = ((end - begin) / grain + 1) * sizeof(Cell);
    void* cells = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED) return false;
    regions[number_of_regions++] = {begin, end, grain, (Cell*)cells};
    return true;
}

UNSEEN static void forget_regions() {
    for (int which = 0; which < number_of_regions; ++which) {
        const Region& region = regions[which];
        munmap(region.cells, ((region.end - region.begin) / region.grain + 1) * sizeof(Cell));
    }
    number_of_regions = 0, pending.bytes = 0;
}

// The memory of this library's variables.
UNSEEN static int find_variables(struct dl_phdr_info* info, size_t, void* found) {
    for (int which = 0; which < info->dlpi_phnum; ++which) {
        const ElfW(Phdr)& part = info->dlpi_phdr[which];
        char* const begin = (char*)info->dlpi_addr + part.p_vaddr;
        if (part.p_type != PT_LOAD || !(part.p_flags & PF_W)) continue;
        if ((char*)&epoch < begin || (char*)&epoch >= begin + part.p_memsz) continue;
        base_of_code = (char*)info->dlpi_addr;
        ((char**)found)[0] = begin, ((char**)found)[1] = begin + part.p_memsz;
        return 1;
    }
    return 0;
}

}  // namespace on_host

// Under names of their own: g++ knows these functions, not in each version by the same parameters.
extern "C" void on_host_block() __asm__("__sanitizer_cov_trace_pc");  // where the code branches, or comes back
extern "C" UNSEEN __attribute__((used)) void on_host_block() {
    unsigned long long& way = on_host::ways[on_host::running];
    way = (way ^ (size_t)__builtin_return_address(0)) * 0x9e3779b97f4a7c15ull;
}
#define SEEN(name, bytes, writes) \
    extern "C" void on_host_##name(void* at) __asm__("__tsan_" #name); \
    extern "C" UNSEEN __attribute__((used)) void on_host_##name(void* at) { \
        on_host::seen(at, bytes, writes, false, __builtin_return_address(0)); \
    }
#define SEEN_OF(bytes) \
    SEEN(read##bytes, bytes, false) SEEN(write##bytes, bytes, true) \
    SEEN(unaligned_read##bytes, bytes, false) SEEN(unaligned_write##bytes, bytes, true)
SEEN_OF(1) SEEN_OF(2) SEEN_OF(4) SEEN_OF(8) SEEN_OF(16)
#define SEEN_RANGE(name, writes) \
    extern "C" void on_host_##name(void* at, long bytes) __asm__("__tsan_" #name); \
    extern "C" UNSEEN __attribute__((used)) void on_host_##name(void* at, long bytes) { \
        on_host::seen(at, bytes, writes, false, __builtin_return_address(0)); \
    }
SEEN_RANGE(read_range, false) SEEN_RANGE(write_range, true)
#define NOTHING_TO_SEE(name) \
    extern "C" void on_host_##name() __asm__("__tsan_" #name); \
    extern "C" UNSEEN __attribute__((used)) void on_host_##name() {}
NOTHING_TO_SEE(init) NOTHING_TO_SEE(func_entry) NOTHING_TO_SEE(func_exit)
