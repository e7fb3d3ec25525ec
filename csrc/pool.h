// The threads of this process that compute: one pool, for every model.
//
// All threads of a run walk through the same program and meet at its phases. A phase is a number of tasks that the
// threads claim; it is over when its tasks are done, not when every thread has been there. So a thread that the
// system has taken off its core delays the others only while it holds a task.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace sakiyomi {

inline void pause_core() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    __asm__ __volatile__("yield");
#else
    std::this_thread::yield();
#endif
}

// Spins for a while, then sleeps, until ready() is true. wake() has to follow what makes it true.
class Gate {
  public:
    template <class Ready>
    void await(Ready ready) {
        for (int i = 0; i < SPINS; ++i) {
            if (ready()) return;
            pause_core();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        sleep_.wait(lock, ready);
        sleepers_.fetch_sub(1);
    }

    void wake() {
        if (sleepers_.load() == 0) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        sleep_.notify_all();
    }

  private:
    static constexpr int SPINS = 2000;  // some 50 microseconds: longer than a phase lasts that goes well
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable sleep_;
};

// What the threads of one run share.
struct Run {
    std::function<void(class Team &)> program;
    alignas(64) std::atomic<uint64_t> claimed{0};  // the phase in the upper bits, the next task in the lower
    alignas(64) std::atomic<int64_t> done{0};      // tasks of the phase that are done
    Gate gate;
};

// One thread's place in a run.
class Team {
  public:
    Team(Run &run, int thread, int threads) : thread(thread), threads(threads), run_(run) {}

    const int thread, threads;

    // Do task(first, last) over 0..tasks, `grain` tasks at a time, and then last() once. Returns when all is done.
    // What it reads outside of tasks must be the same on every thread and must outlive the run's program: a thread may
    // come to a phase after the run has ended.
    template <class Task, class Last>
    void phase(int64_t tasks, int64_t grain, Task task, Last last) {
        if (tasks <= 0) return;
        const uint64_t phase = phase_++;
        uint64_t seen = run_.claimed.load();
        for (;;) {
            if (seen >> SHIFT != phase) return;  // all done already
            const int64_t first = static_cast<int64_t>(seen & MASK);
            if (first >= tasks) break;
            const int64_t end = first + grain < tasks ? first + grain : tasks;
            if (!run_.claimed.compare_exchange_weak(seen, (phase << SHIFT) | static_cast<uint64_t>(end))) continue;
            task(first, end);
            if (run_.done.fetch_add(end - first) + end - first == tasks) {
                last();
                run_.done.store(0);
                run_.claimed.store((phase + 1) << SHIFT);
                run_.gate.wake();
                return;
            }
            seen = run_.claimed.load();
        }
        run_.gate.await([&] { return run_.claimed.load() >> SHIFT != phase; });
    }

    template <class Task>
    void phase(int64_t tasks, int64_t grain, Task task) {
        phase(tasks, grain, task, [] {});
    }

  private:
    static constexpr int SHIFT = 32;
    static constexpr uint64_t MASK = (uint64_t{1} << SHIFT) - 1;
    Run &run_;
    uint64_t phase_ = 0;
};

class Pool {
  public:
    // The process's pool. After a fork the child has a new one.
    static Pool &instance();

    // Run a program on this thread and up to threads - 1 others; runs of several callers take turns in order.
    // `program` may be called on a thread that comes late, after run() has returned, but then gets no tasks.
    void run(int threads, std::function<void(Team &)> program);

  private:
    class Turn;
    Pool() = default;
    void work(int index);
    void offer(std::shared_ptr<Run> run, int threads);

    // Callers take turns.
    std::mutex turn_mutex_;
    std::condition_variable turn_changed_;
    uint64_t next_ticket_ = 0, turn_ = 0;

    // The run on offer.
    Gate gate_;
    std::atomic<uint64_t> offered_{0};
    std::mutex offer_mutex_;
    std::shared_ptr<Run> offer_;
    int offer_threads_ = 0;
    int workers_ = 0;
};

}  // namespace sakiyomi
