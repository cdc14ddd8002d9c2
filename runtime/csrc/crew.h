// `on_threads`: work on several threads, none of which waits long for one that is not running.
//
// OpenMP's threads spin until the last of them is through, at the end of each of a step's many parallel regions. Beside
// other processes the last one may be waiting for a core: a step of 6 ms then takes 100. Here a caller begins at once.
// Helpers that come late find less to do, and the caller does without those that have not begun when nothing is left.
// Whoever has nothing to do spins for microseconds, then sleeps.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace specache {

// Longer than most gaps between two pieces of a step's work, and about what it takes to wake a thread.
constexpr std::chrono::microseconds kSpin{50};
constexpr int64_t kMostHelpers = 255;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Moment = std::chrono::steady_clock::time_point;

// Spins until `is_done()`, or until a moment; whether it is.
template <class IsDone>
bool spin_until(const IsDone& is_done, Moment end) {
  do {
    for (int i = 0; i < 16; i++) {
      if (is_done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return is_done();
}

template <class IsDone>
bool spin_until(const IsDone& is_done) {
  return spin_until(is_done, std::chrono::steady_clock::now() + kSpin);
}

// Sleeps until `is_done()`. Whoever makes it so calls `wake` afterwards. Both are sequentially consistent: either the
// sleeper sees what was done, or the waker sees the sleeper.
class Bed {
 public:
  template <class IsDone>
  void sleep_until(const IsDone& is_done) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_++;
    woken_.wait(lock, is_done);
    sleepers_--;
  }
  void wake() {
    if (sleepers_ == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // who is about to sleep sleeps then
    woken_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable woken_;
  std::atomic<int> sleepers_{0};
};

// Threads that are started meanwhile get no signals: these are for the program's own threads.
class Undisturbed {
 public:
  Undisturbed() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~Undisturbed() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// A thread that does a thing, then sleeps until it is deleted. What OpenMP keeps for a thread lives as long.
class Sleeper {
 public:
  explicit Sleeper(void (*begin)()) {
    const Undisturbed signals;
    thread_ = std::thread([this, begin] {
      begin();
      std::unique_lock<std::mutex> lock(mutex_);
      woken_.wait(lock, [this] { return ends_; });
    });
  }
  ~Sleeper() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    woken_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable woken_;
  bool ends_ = false;
  std::thread thread_;
};

struct Job {
  void (*run)(const void* work, int64_t thread);
  const void* work;
  std::atomic<int64_t> begun{1}, ended{0};  // threads: the caller has begun, and need not say when it ends
};

// A thread that helps one caller at a time.
class Helper {
 public:
  explicit Helper(Bed& callers) : callers_(callers), thread_([this] { serve(); }) { thread_.detach(); }

  // Whether it was free: it will begin the job, if it is not dismissed before.
  bool offer(Job* job) {
    Job* none = nullptr;
    if (!job_.compare_exchange_strong(none, job)) return false;
    bed_.wake();
    return true;
  }

  // Whether it had been offered the job, and had not begun.
  bool dismiss(Job* job) { return job_ == job && job_.compare_exchange_strong(job, nullptr); }

 private:
  void serve() {
    for (;;) {
      Job* job = nullptr;
      const auto is_offered = [&] { return (job = job_) != nullptr; };
      if (!spin_until(is_offered)) bed_.sleep_until(is_offered);
      if (!job_.compare_exchange_strong(job, &taken_)) continue;
      job->run(job->work, job->begun++);
      job_ = nullptr;
      job->ended++;  // from now on the caller may return, with its job
      callers_.wake();
    }
  }

  Bed bed_, &callers_;
  Job taken_{};  // in the place of a job that has begun
  std::atomic<Job*> job_{nullptr};
  std::thread thread_;
};

// All helpers of the process, for all callers. They end with it.
class Crew {
 public:
  // One for all of our libraries, where the linker knows unique symbols; else one for each.
  static Crew& only() {
    static Crew* const crew = [] {
      pthread_atfork(nullptr, nullptr, [] { new (&only()) Crew; });  // a forked process has none of the threads
      return new Crew;
    }();
    return *crew;
  }

  void run(Job* job, int64_t threads) {
    const int64_t wanted = threads - 1, known = grow(wanted);
    int64_t helpers = 0;
    for (int64_t i = 0; i < known && helpers < wanted; i++) helpers += helpers_[i]->offer(job);
    job->run(job->work, 0);
    for (int64_t i = 0; i < known; i++) helpers -= helpers_[i]->dismiss(job);
    const auto is_done = [&] { return job->ended == helpers; };
    if (!spin_until(is_done)) callers_.sleep_until(is_done);
  }

 private:
  // The number of helpers: so many as are wanted, or as the system lets us have.
  int64_t grow(int64_t wanted) {
    if (num_helpers_ >= std::min(wanted, kMostHelpers)) return num_helpers_;
    std::lock_guard<std::mutex> lock(growing_);
    const Undisturbed signals;
    try {
      for (; num_helpers_ < std::min(wanted, kMostHelpers); num_helpers_++)
        helpers_[num_helpers_] = new Helper(callers_);
    } catch (const std::exception&) {
    }
    return num_helpers_;
  }

  Bed callers_;
  std::mutex growing_;
  std::atomic<int64_t> num_helpers_{0};
  Helper* helpers_[kMostHelpers];
};

// Calls `work(thread)` here and on so many threads less one; `thread` is from 0 to `threads - 1`. Not all of them may
// come: `work` takes pieces from a counter until none is left. It throws nothing.
template <class Work>
void on_threads(int64_t threads, const Work& work) {
  if (threads < 2) return work(0);
  Job job{[](const void* it, int64_t thread) { (*static_cast<const Work*>(it))(thread); }, &work};
  Crew::only().run(&job, threads);
}

}  // namespace specache
