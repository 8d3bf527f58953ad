// How a kernel that runs on the processor is launched: its tensors' memory, its blocks. The kernel stands before.

}  // of the namespace in which the kernel stands

namespace on_host {

struct Tensor {
    const char* given;  // where it is copied from, and to if it may be written
    long long bytes;
    int may_be_written;
    int element;   // bytes
    char* place;   // where the kernel sees it
    char* begin;   // of the pages that can be reached
    char* end;
};

static const long long OUT_OF_REACH = 16 << 20;  // bytes on each side

// A copy that lies at the end, or the beginning, of pages that can be reached; what is left of them is filled with 0xff.
UNSEEN static bool lay_out(Tensor& tensor, bool at_the_end) {
    const long long page = 4096, pages = (tensor.bytes + 16 + page - 1) / page * page;
    char* all = (char*)mmap(nullptr, pages + 2 * OUT_OF_REACH, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return false;
    tensor.begin = all + OUT_OF_REACH, tensor.end = tensor.begin + pages;
    if (mprotect(tensor.begin, pages, PROT_READ | PROT_WRITE)) return false;
    memset(tensor.begin, 0xff, pages);
    const long long aligned = (long long)tensor.given % 16;  // as it is where it comes from
    tensor.place = tensor.begin + aligned;
    if (at_the_end) tensor.place += (pages - tensor.bytes - aligned) / 16 * 16;
    memcpy(tensor.place, tensor.given, tensor.bytes);
    return tensor.may_be_written || !mprotect(tensor.begin, pages, PROT_READ);
}

// Whether a byte beside it was written; where it is then stands in the fault.
UNSEEN static bool written_beside(const Tensor& tensor) {
    for (char* at = tensor.begin; at < tensor.end; ++at) {
        if (at == tensor.place) at += tensor.bytes;
        if (at < tensor.end && *at != (char)0xff) {
            fault.address = at;
            return true;
        }
    }
    return false;
}

template <int...> struct Places {};
template <int left, int... places> struct Count : Count<left - 1, left - 1, places...> {};
template <int... places> struct Count<0, places...> { using All = Places<places...>; };

static void** values;

template <typename... Values, int... places> static void call(void (*kernel)(Values...), Places<places...>) {
    kernel(*(Values*)values[places]...);
}
template <typename... Values> static void call(void (*kernel)(Values...)) {
    call(kernel, typename Count<sizeof...(Values)>::All());
}
template <typename... Values> static int parameters(void (*)(Values...)) { return sizeof...(Values); }

template <typename Value> struct KindOf { static const char word = '?'; };
template <typename Value> struct KindOf<Value*> { static const char word = 'p'; };
template <> struct KindOf<int> { static const char word = 'i'; };
template <> struct KindOf<unsigned> { static const char word = 'i'; };
template <> struct KindOf<float> { static const char word = 'f'; };
template <typename... Values> static const char* kinds(void (*)(Values...)) {
    static const char words[] = {KindOf<Values>::word..., 0};
    return words;
}
UNSEEN static void call_kernel() { call(KERNEL); }

UNSEEN static void run(int grid, bool descending) {
    static char* stacks;
    if (!stacks) {
        stacks = (char*)mmap(nullptr, 1024ll * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stacks == MAP_FAILED) abort();
    }
    for (int number = 0; number < grid; ++number) {
        blockIdx.x = descending ? grid - 1 - number : number;
        memset(__start_of_a_block, 0xff, __stop_of_a_block - __start_of_a_block);
        begin_block(blockIdx.x);
        for (int thread = 0; thread < count; ++thread) {
            Fiber& fiber = fibers[thread];
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = stacks + (long long)thread * STACK;
            fiber.context.uc_stack.ss_size = STACK;
            fiber.context.uc_link = &scheduler;
            fiber.state = READY, fiber.active = 0;
            makecontext(&fiber.context, of_thread, 0);
        }
        run_block(descending);
        if (raced) tell_race();
    }
}

}  // namespace on_host

extern "C" UNSEEN int parameters_of_kernel() { return on_host::parameters(KERNEL); }
extern "C" UNSEEN const char* kinds_of_parameters() { return on_host::kinds(KERNEL); }
extern "C" UNSEEN int most_threads_of_block() { return LAUNCH_BOUND; }
extern "C" UNSEEN int shared_bytes_of_block() {
    return __stop_of_a_block - __start_of_a_block - (int)sizeof at_least_this;
}

extern "C" UNSEEN const on_host::Fault* run_kernel(int grid, int threads, int descending, double seconds, void** values,
                                            on_host::Tensor* tensors, void*** at, int number) {
    using namespace on_host;
    static char signal_stack[64 << 10];
    static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGPROF};
    fault = Fault();
    on_host::values = values;
    count = threads;
    blockDim = {(unsigned)threads, 1, 1}, gridDim = {(unsigned)grid, 1, 1};
    kernel_of_thread = call_kernel;
    for (int which = 0; which < number; ++which) {
        if (!lay_out(tensors[which], !descending)) abort();
        *at[which] = tensors[which].place;
    }
    char* variables[2] = {};
    dl_iterate_phdr(find_variables, variables);
    bool all = watch(__start_of_a_block, __stop_of_a_block, 1) && watch(variables[0], variables[1], 1);
    for (int which = 0; which < number; ++which) {
        Tensor& tensor = tensors[which];
        if (tensor.bytes) all = all && watch(tensor.place, tensor.place + tensor.bytes, tensor.element);
    }
    if (!all) abort();
    first_of_launch = epoch + 1, unset = Access();
    stack_t stack = {}, stack_before;
    stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {}, before[4];
    action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int which = 0; which < 4; ++which) sigaction(signals[which], &action, &before[which]);
    struct itimerval limit = {}, none = {};
    limit.it_value.tv_sec = (long)seconds;
    limit.it_value.tv_usec = (long)((seconds - (long)seconds) * 1e6);
    if (!sigsetjmp(out, 1)) {
        setitimer(ITIMER_PROF, &limit, nullptr);
        watching = true;
        run(grid, descending);
    }
    watching = false;
    setitimer(ITIMER_PROF, &none, nullptr);
    if (unset.epoch) {
        fault.unset_thread = unset.thread, fault.unset_block = unset.block;
        fault.unset_place = (void*)(size_t)unset.place;
    }
    forget_regions();
    for (int which = 0; which < 4; ++which) sigaction(signals[which], &before[which], nullptr);
    if (!(stack_before.ss_flags & SS_DISABLE)) sigaltstack(&stack_before, nullptr);
    for (int which = 0; which < number; ++which) {
        Tensor& tensor = tensors[which];
        if (!fault.kind && tensor.may_be_written && written_beside(tensor))
            fault.kind = OUTSIDE, fault.thread = fault.block = -1, fault.writes = 1;
        if (tensor.may_be_written) memcpy((char*)tensor.given, tensor.place, tensor.bytes);
        munmap(tensor.begin - OUT_OF_REACH, tensor.end - tensor.begin + 2 * OUT_OF_REACH);
    }
    fflush(nullptr);
    return &fault;
}
