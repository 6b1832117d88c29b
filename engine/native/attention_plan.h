// Cuts a batch's attention into items of about equal work, for any number of threads.
//
// Owns the partial results of units that are cut along their context. Invariant: how the work is cut has no part in the results.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"

namespace headrace {

constexpr int64_t ATTENTION_ROWS = 96;  // queries x heads of a group of a unit: their state stays in the L2 cache

class AttentionPlan {
  public:
    // Sequence s: rows [starts[s], starts[s + 1]), the last of its lens[s] tokens; its blocks from tables[s * max_blocks] on.
    AttentionPlan(const AttentionArgs& args, const Kernels& kernels, const int32_t* tables, int64_t max_blocks, const int32_t* starts, const int32_t* lens,
                  int64_t sequences, int threads);

    int64_t items() const { return int64_t(item_starts_.size()) - 1; }
    size_t scratch_bytes() const { return scratch_bytes_; }
    // Once for each item, on any thread.
    void run(int64_t item, Dtype dtype, char* scratch);

  private:
    struct Cut {
        AttentionUnit whole;
        std::unique_ptr<char[]> partials;
        std::unique_ptr<std::atomic<int>> missing;
    };

    void add(const AttentionUnit& whole, int64_t item_work);
    int64_t work(const AttentionUnit& unit) const;
    int64_t rows(const AttentionUnit& unit) const { return unit.queries * (args_.heads / args_.pool.kv_heads); }

    const AttentionArgs& args_;
    const Kernels& kernels_;
    std::vector<AttentionUnit> units_;
    std::vector<int64_t> cut_of_;  // of each unit: index in cuts_, or -1
    std::vector<int64_t> item_starts_;  // the units of item i: [item_starts_[i], item_starts_[i + 1])
    std::vector<Cut> cuts_;
    size_t scratch_bytes_ = 0;
};

}  // namespace headrace
