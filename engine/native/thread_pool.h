// A persistent pool of threads that sleep while there is no work. The caller works too, so a late helper costs nothing.
#pragma once
#include <cstdint>
#include <functional>

namespace headrace {

// Calls task(item) for each item in [0, items), on at most `threads` threads, the caller among them; returns when all are done.
// One call at a time owns the helpers; a call beside it, and any with threads <= 1, runs on its own thread alone.
void parallel_for(int64_t items, int threads, const std::function<void(int64_t)>& task);

}  // namespace headrace
