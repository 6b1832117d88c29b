#include "attention_plan.h"

#include <algorithm>

namespace headrace {
namespace {

constexpr int64_t ITEMS_PER_THREAD = 8;
constexpr int64_t OVERHEAD_ROWS = 8;       // a token's K/V costs as much as this many rows' products with it
constexpr int64_t LEAST_WORK = 512 * OVERHEAD_ROWS;  // of an item: some 10 us, what waking a thread costs

int ranges(int64_t tokens) { return int((tokens + RANGE_TOKENS - 1) / RANGE_TOKENS); }

}  // namespace

AttentionPlan::AttentionPlan(const AttentionArgs& args, const Kernels& kernels, const int32_t* tables, int64_t max_blocks, const int32_t* starts,
                             const int32_t* lens, int64_t sequences, int threads)
    : args_(args), kernels_(kernels) {
    int64_t step = std::max<int64_t>(1, ATTENTION_ROWS / (args.heads / args.pool.kv_heads)), total = 0;
    std::vector<AttentionUnit> wholes;
    for (int64_t s = 0; s < sequences; ++s)
        for (int64_t first = starts[s]; first < starts[s + 1]; first += step)
            for (int64_t head = 0; head < args.pool.kv_heads; ++head) {
                int queries = int(std::min(step, starts[s + 1] - first));
                int64_t position = lens[s] - (starts[s + 1] - first);
                wholes.push_back({tables + s * max_blocks, first, position, head, queries, 0, ranges(position + queries), nullptr});
                total += work(wholes.back());
            }
    int64_t item_work = threads <= 1 ? total : std::max(total / (threads * ITEMS_PER_THREAD), LEAST_WORK), gathered = 0;
    units_.reserve(wholes.size());
    for (const AttentionUnit& whole : wholes) add(whole, item_work);
    for (size_t i = 0; i < units_.size(); ++i) {
        if (gathered == 0) item_starts_.push_back(int64_t(i));
        gathered += work(units_[i]);
        if (gathered >= item_work) gathered = 0;
        scratch_bytes_ = std::max(scratch_bytes_, kernels.attention_scratch_bytes(rows(units_[i]), args.pool.head_dim));
    }
    item_starts_.push_back(int64_t(units_.size()));
}

// Tokens seen x what one costs. An estimate: results do not depend on it.
int64_t AttentionPlan::work(const AttentionUnit& unit) const {
    int64_t tokens = std::min(unit.context(), int64_t(unit.last_range) * RANGE_TOKENS) - int64_t(unit.first_range) * RANGE_TOKENS;
    if (args_.window > 0) tokens = std::min(tokens, args_.window + args_.sinks + unit.queries);
    return tokens * (rows(unit) + OVERHEAD_ROWS);
}

void AttentionPlan::add(const AttentionUnit& whole, int64_t item_work) {
    int pieces = int(std::min<int64_t>(whole.last_range, (work(whole) + item_work - 1) / item_work));
    if (pieces <= 1) {
        units_.push_back(whole);
        cut_of_.push_back(-1);
        return;
    }
    size_t bytes = kernels_.attention_partial_bytes(rows(whole), args_.pool.head_dim) * size_t(whole.last_range);
    cuts_.push_back({whole, std::unique_ptr<char[]>(new char[bytes]), std::make_unique<std::atomic<int>>(pieces)});
    AttentionUnit& cut = cuts_.back().whole;
    cut.partials = cuts_.back().partials.get();
    for (int piece = 0; piece < pieces; ++piece) {
        units_.push_back(cut);
        units_.back().first_range = int(int64_t(whole.last_range) * piece / pieces);
        units_.back().last_range = int(int64_t(whole.last_range) * (piece + 1) / pieces);
        cut_of_.push_back(int64_t(cuts_.size()) - 1);
    }
}

void AttentionPlan::run(int64_t item, Dtype dtype, char* scratch) {
    int64_t first = item_starts_[item], last = item_starts_[item + 1];
    kernels_.attention[dtype](args_, units_.data() + first, units_.data() + last, scratch);
    for (int64_t i = first; i < last; ++i)  // whoever computes a cut unit's last piece merges all of them
        if (cut_of_[i] >= 0 && cuts_[cut_of_[i]].missing->fetch_sub(1) == 1) kernels_.attention_merge[dtype](args_, cuts_[cut_of_[i]].whole, scratch);
}

}  // namespace headrace
