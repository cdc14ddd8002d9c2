// Copies of rows from the host: at once, or by the threads that compute. Those take one before their share of the next
// product of weights, so that no thread of its own contends with them for cores. See copies.py.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "stage.h"

namespace {

enum State : int64_t { kIdle, kPending, kRunning, kDone };

}  // namespace

extern "C" {

struct SpecacheCopy {
  SpecacheStage stage;
  int64_t failed;              // what `specache_stage` returned
  std::atomic<int64_t> state;  // whoever puts it to kRunning makes the copy
  int64_t thread;              // the system's number of who made it
  double start, stop;          // seconds of the steady clock
  SpecacheCopy* next;
};
}

namespace {

std::mutex lock;  // of the list: copies that are pending, the oldest first
SpecacheCopy *oldest = nullptr, *newest = nullptr;
std::atomic<int64_t> num_pending{0};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void make(SpecacheCopy* copy) {
  copy->thread = syscall(SYS_gettid);
  copy->start = now();
  copy->failed = specache::stage(&copy->stage);
  copy->stop = now();
  copy->state.store(kDone, std::memory_order_release);
}

// Takes a copy off the list; null for the oldest one. Null where it is not there.
SpecacheCopy* take(const SpecacheCopy* wanted) {
  const std::lock_guard<std::mutex> held(lock);
  SpecacheCopy *before = nullptr, *copy = oldest;
  for (; copy != nullptr && wanted != nullptr && copy != wanted; copy = copy->next) before = copy;
  if (copy == nullptr) return nullptr;
  (before == nullptr ? oldest : before->next) = copy->next;
  if (newest == copy) newest = before;
  num_pending--;
  copy->state.store(kRunning, std::memory_order_relaxed);
  return copy;
}

}  // namespace

extern "C" {

int64_t specache_copy_size() { return sizeof(SpecacheCopy); }

int64_t specache_stage(SpecacheStage* stage) { return specache::stage(stage); }

// Leaves a copy to the next product. It, and what it points to, must stay until `specache_copy_finish`.
void specache_copy_start(SpecacheCopy* copy) {
  // An interrupt may have kept Python from noting that it was started before.
  while (copy->state.load(std::memory_order_acquire) == kRunning) std::this_thread::yield();
  const std::lock_guard<std::mutex> held(lock);
  if (copy->state.load(std::memory_order_relaxed) == kPending) return;
  copy->state.store(kPending, std::memory_order_relaxed);
  copy->next = nullptr;
  (oldest == nullptr ? oldest : newest->next) = copy;
  newest = copy;
  num_pending++;
}

// Makes the copies that are pending.
void specache_copies_make() {
  while (num_pending.load(std::memory_order_relaxed) > 0) {
    SpecacheCopy* const copy = take(nullptr);
    if (copy == nullptr) return;
    make(copy);
  }
}

// Returns when a copy is through: made here, and then 1, where nobody had taken it.
int64_t specache_copy_finish(SpecacheCopy* copy) {
  if (copy->state.load(std::memory_order_acquire) == kPending && take(copy) != nullptr) {
    make(copy);
    return 1;
  }
  while (copy->state.load(std::memory_order_acquire) == kRunning) std::this_thread::yield();
  return 0;
}
}
