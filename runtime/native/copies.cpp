// Copies of rows from the host: at once, by the threads that compute, or by a thread that does nothing else. Those that
// compute take one before their share of the next product of weights, so that no such thread contends with them for
// cores. See copies.py.
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>

#include "stage.h"

namespace {

enum State : int64_t { kIdle, kPending, kRunning, kDone };

}  // namespace

extern "C" {

struct SpecacheCopy;

// Copies that are pending, the oldest first.
struct SpecacheCopyQueue {
  SpecacheCopy *oldest, *newest;
  int64_t ended;                  // its thread is to return
  std::condition_variable* came;  // what its thread waits for; null before it has begun
  int64_t process;                // `num_forks` when it began: in a forked process it is not there
};

struct SpecacheCopy {
  SpecacheStage stage;
  int64_t failed;              // what `specache_stage` returned
  std::atomic<int64_t> state;  // whoever puts it to kRunning makes the copy
  int64_t thread;              // the system's number of who made it
  double start, stop;          // seconds of the steady clock
  SpecacheCopyQueue* queue;    // of a thread; null for the next product
  SpecacheCopy* next;
};
}

namespace {

// Never destroyed: a thread may still wait when the process ends.
std::mutex& lock = *new std::mutex;  // of all queues
std::condition_variable& made = *new std::condition_variable;
SpecacheCopyQueue of_products{};
int64_t num_running = 0, num_forks = 0;
std::atomic<int64_t> num_left_to_products{0};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

SpecacheCopyQueue& queue_of(const SpecacheCopy* copy) { return copy->queue == nullptr ? of_products : *copy->queue; }

// Takes a copy off its queue, with the lock; null where it is not there.
SpecacheCopy* take(SpecacheCopyQueue& queue, const SpecacheCopy* wanted) {
  SpecacheCopy *before = nullptr, *copy = queue.oldest;
  for (; copy != nullptr && copy != wanted; copy = copy->next) before = copy;
  if (copy == nullptr) return nullptr;
  (before == nullptr ? queue.oldest : before->next) = copy->next;
  if (queue.newest == copy) queue.newest = before;
  if (&queue == &of_products) num_left_to_products--;
  num_running++;
  copy->state.store(kRunning, std::memory_order_relaxed);
  return copy;
}

void make(SpecacheCopy* copy) {
  copy->thread = syscall(SYS_gettid);
  copy->start = now();
  copy->failed = specache::stage(&copy->stage);
  copy->stop = now();
  {
    const std::lock_guard<std::mutex> held(lock);
    num_running--;
    copy->state.store(kDone, std::memory_order_release);  // from here on it may be gone
  }
  made.notify_all();
}

// A forked process has none of the threads that make copies or wait: it gets no copy that is half made, and a lock and a
// condition that nobody uses.
void before_fork() {
  std::unique_lock<std::mutex> held(lock);
  made.wait(held, [] { return num_running == 0; });
  held.release();
}
void in_parent() { lock.unlock(); }
void in_child() {
  new (&lock) std::mutex;
  new (&made) std::condition_variable;
  num_forks++;
}
const int handles_forks = pthread_atfork(before_fork, in_parent, in_child);

}  // namespace

extern "C" {

int64_t specache_copy_size() { return sizeof(SpecacheCopy); }

int64_t specache_stage(SpecacheStage* stage) { return specache::stage(stage); }

// Leaves a copy that is neither pending nor running to its queue. It, and what it points to, must stay until
// `specache_copy_finish`.
void specache_copy_start(SpecacheCopy* copy) {
  const std::lock_guard<std::mutex> held(lock);
  SpecacheCopyQueue& queue = queue_of(copy);
  copy->state.store(kPending, std::memory_order_relaxed);
  copy->next = nullptr;
  (queue.oldest == nullptr ? queue.oldest : queue.newest->next) = copy;
  queue.newest = copy;
  if (&queue == &of_products) num_left_to_products++;
  if (queue.came != nullptr && queue.process == num_forks) queue.came->notify_one();
}

// Makes the copies that are left to products.
void specache_copies_make() {
  while (num_left_to_products.load(std::memory_order_relaxed) > 0) {
    std::unique_lock<std::mutex> held(lock);
    SpecacheCopy* const copy = take(of_products, of_products.oldest);
    held.unlock();
    if (copy == nullptr) return;
    make(copy);
  }
}

// Makes the copies of a queue as they come, until it has ended. What is pending then is made by who waits for it.
void specache_copies_serve(SpecacheCopyQueue* queue) {
  std::condition_variable came;
  std::unique_lock<std::mutex> held(lock);
  queue->came = &came;
  queue->process = num_forks;
  while (true) {
    came.wait(held, [queue] { return queue->oldest != nullptr || queue->ended; });
    if (queue->ended) {
      queue->came = nullptr;
      return;
    }
    SpecacheCopy* const copy = take(*queue, queue->oldest);
    held.unlock();
    make(copy);
    held.lock();
  }
}

// Has the thread of a queue return.
void specache_copies_end(SpecacheCopyQueue* queue) {
  const std::lock_guard<std::mutex> held(lock);
  queue->ended = 1;
  if (queue->came != nullptr && queue->process == num_forks) queue->came->notify_one();
}

// Returns when a copy is through: made here, and then 1, where nobody had taken it. 2 where it is not after `seconds`.
int64_t specache_copy_finish(SpecacheCopy* copy, double seconds) {
  if (copy->state.load(std::memory_order_acquire) == kDone) return 0;
  std::unique_lock<std::mutex> held(lock);
  if (copy->state.load(std::memory_order_relaxed) == kPending) {
    take(queue_of(copy), copy);
    held.unlock();
    make(copy);
    return 1;
  }
  const auto through = [copy] { return copy->state.load(std::memory_order_relaxed) != kRunning; };
  return made.wait_for(held, std::chrono::duration<double>(seconds), through) ? 0 : 2;
}
}
