// Paged attention of units: tiles of queries against one KV head, tile by tile with an online softmax in fp32. Included by isa_*.cpp after lanes.h.
//
// The context is cut into ranges of RANGE_TOKENS tokens. Each range's softmax starts anew and is merged into the total in the order of the
// context, so that it does not matter where the ranges were computed, nor by whom.

#include "attention_tiles.h"

// ---- where a tile lies ---------------------------------------------------------------------------------------------------------

template <class T> struct Tile {
    const T* keys[TILE_RUNS];
    const T* values[TILE_RUNS];
    int tokens;  // of the sequence

    int valid(int run) const {
        int left = tokens - run * RUN_TOKENS;
        return left < 0 ? 0 : left < RUN_TOKENS ? left : RUN_TOKENS;
    }
};

template <class T> inline Tile<T> tile_at(const AttentionArgs& a, const AttentionUnit& u, int64_t start) {
    const Pool& pool = a.pool;
    int64_t left = u.context() - start;
    Tile<T> tile;
    tile.tokens = left < TILE_TOKENS ? int(left) : TILE_TOKENS;
    for (int run = 0; run < TILE_RUNS; ++run) {
        int64_t at = tile.valid(run) > 0 ? start + run * RUN_TOKENS : start;
        tile.keys[run] = (const T*)pool.block(u.block_table[at / pool.block_tokens], u.kv_head, a.layer) + at % pool.block_tokens * pool.head_dim;
        tile.values[run] = tile.keys[run] + pool.block_tokens * pool.head_dim;
    }
    return tile;
}

// The tiles of which some row of the unit sees something, in order.
struct Walk {
    const AttentionArgs& a;
    const AttentionUnit *unit, *last;
    int64_t start;  // in the unit's sequence

    Walk(const AttentionArgs& args, const AttentionUnit* first_unit, const AttentionUnit* last_unit) : a(args), unit(first_unit), last(last_unit) { enter(); }

    bool ended() const { return unit == last; }
    void next() {
        start += TILE_TOKENS;
        settle();
    }

  private:
    void enter() {
        start = ended() ? 0 : int64_t(unit->first_range) * RANGE_TOKENS;
        settle();
    }
    void settle() {
        while (!ended()) {
            int64_t window_start = a.window > 0 ? unit->first_position + 1 - a.window : 0;
            if (start >= a.sinks && start + TILE_TOKENS <= window_start) start = window_start / TILE_TOKENS * TILE_TOKENS;
            int64_t end = int64_t(unit->last_range) * RANGE_TOKENS;
            if (start < end && start < unit->context()) return;
            ++unit;
            start = ended() ? 0 : int64_t(unit->first_range) * RANGE_TOKENS;
        }
    }
};

// The tile after the one computed, whose lines are asked for meanwhile, some at a time: all at once they would hold up the loads behind them.
// At the very end it is the last tile again.
template <class T> class Ahead {
  public:
    Ahead(const AttentionArgs& args, const AttentionUnit* first, const AttentionUnit* last) : a_(args), walk_(args, first, last) {}

    Tile<T> next() {
        AttentionUnit unit = *walk_.unit;
        int64_t start = walk_.start;
        walk_.next();
        return walk_.ended() ? tile_at<T>(a_, unit, start) : tile_at<T>(a_, *walk_.unit, walk_.start);
    }

  private:
    const AttentionArgs& a_;
    Walk walk_;
};

#include "attention_direct.h"

// ---- one unit ------------------------------------------------------------------------------------------------------------------

// The rows of a unit: queries x heads of a group.
struct Rows {
    int count;
    int64_t group;
    const uint32_t* q[MAX_ATTENTION_ROWS];
    Seen seen[MAX_ATTENTION_ROWS];
    int first, last;  // those that see something of the current tile

    void look(const AttentionArgs& a, const AttentionUnit& u, int64_t start) {
        first = count, last = 0;
        for (int row = 0; row < count; ++row) {
            int64_t position = u.first_position + row / group - start;
            int64_t gap_end = a.window > 0 ? position + 1 - a.window : 0, gap = a.sinks - start;
            seen[row] = {in_tile(position + 1), a.window > 0 ? in_tile(gap) : 0, in_tile(gap_end)};
            if (seen[row].nothing()) continue;
            if (first == count) first = row;
            last = row + 1;
        }
    }
    static int in_tile(int64_t token) { return token < 0 ? 0 : token > TILE_TOKENS ? TILE_TOKENS : int(token); }
};

template <class T, class Lanes> void prepare(const AttentionArgs& a, const AttentionUnit& u, Rows& rows, Scratch& s) {
    int64_t dim = a.pool.head_dim;
    for (int row = 0; row < rows.count; ++row) {
        const T* in = (const T*)a.q + (u.first_row + row / rows.group) * a.q_stride + (u.kv_head * rows.group + row % rows.group) * dim;
        rows.q[row] = (const uint32_t*)in;
        if (sizeof(T) * Lanes::ITEMS == 4) continue;
        widen(in, dim, (float*)s.queries + row * dim);  // bf16 computed in fp32
        rows.q[row] = s.queries + row * dim;
    }
}

template <class T, class Lanes> void packed_tile(const Tile<T>& tile, const Tile<T>& next, const Rows& rows, int64_t dim, float scale, Scratch& s) {
    s.ahead.begin(next.keys, next.values, RUN_TOKENS * dim * int64_t(sizeof(T)), rows.last - rows.first);
    for (int run = 0; run < TILE_RUNS; ++run)
        if (tile.valid(run) > 0) pack_keys(Lanes(), tile.keys[run], dim, run, s);
    score_from<Lanes, Simd::SCORE_ROWS>(rows.first, rows.last, rows.q, dim / Lanes::ITEMS, rows.seen, scale, s.range, s);
    for (int run = 0; run < TILE_RUNS; ++run)
        if (tile.valid(run) > 0) pack_values(Lanes(), tile.values[run], dim, run, tile.valid(run), s);
    values_from<Lanes, Simd::VALUE_ROWS>(rows.first, rows.last, padded_dim(dim), tile.tokens, rows.seen, s.range, s);
}

// Whether rows go straight from the pool: the registers hold K and V as they are.
template <class T, class Lanes> constexpr bool CAN_BE_DIRECT = W == 16 && sizeof(T) * Lanes::ITEMS == 4;

template <class T, class Lanes> void attend_tile(const Tile<T>& tile, const Tile<T>& next, const Rows& rows, int64_t dim, float scale, bool direct, Scratch& s) {
    if constexpr (CAN_BE_DIRECT<T, Lanes>)
        if (direct) return direct_tile<T, Lanes, DIRECT_ROWS>(tile, next, rows.first, rows.last, rows.q, rows.seen, dim, scale, s);
    packed_tile<T, Lanes>(tile, next, rows, dim, scale, s);
}

// total = total and part, two sets of tokens.
inline void merge(State& total, const State& part, int64_t rows, int64_t dim) {
    int64_t width = padded_dim(dim);
    for (int64_t row = 0; row < rows; ++row) {
        if (part.maxima[row] == NOTHING) continue;
        float top = part.maxima[row] > total.maxima[row] ? part.maxima[row] : total.maxima[row];
        F ours = power(FloatLanes(), Simd::set1(total.maxima[row] - top)), theirs = power(FloatLanes(), Simd::set1(part.maxima[row] - top));
        auto both = [&](float* to, const float* from, int64_t size) {
            for (int64_t i = 0; i < size; i += W) Simd::store(to + i, Simd::fma(Simd::load(from + i), theirs, Simd::mul(Simd::load(to + i), ours)));
        };
        both(total.acc + row * width, part.acc + row * width, width);
        both(total.sums + row * 16, part.sums + row * 16, 16);
        total.maxima[row] = top;
    }
}

template <class T> void write_rows(const AttentionArgs& a, const AttentionUnit& u, int64_t group, const State& state) {
    int64_t dim = a.pool.head_dim, width = padded_dim(dim);
    for (int row = 0; row < u.queries * group; ++row) {
        T* out = (T*)a.out + ((u.first_row + row / group) * a.heads + u.kv_head * group + row % group) * dim;
        F inverse = Simd::set1(1.f / Simd::sum(Simd::load(state.sums + row * 16)));
        const float* acc = state.acc + row * width;
        int64_t d = 0;
        for (; d + W <= dim; d += W) Simd::store(out + d, Simd::mul(Simd::load(acc + d), inverse));
        if (d < dim) store_first(out + d, Simd::mul(load_first(acc + d, int(dim - d)), inverse), int(dim - d));
    }
}

// The unit's tiles of one range, from `walk` on; s.range holds the result.
template <class T, class Lanes>
void attend_range(const AttentionArgs& a, Walk& walk, Ahead<T>& ahead, Rows& rows, Scratch& s) {
    const AttentionUnit* unit = walk.unit;
    int64_t dim = a.pool.head_dim, range = walk.start / RANGE_TOKENS;
    bool direct = CAN_BE_DIRECT<T, Lanes> && rows.count <= DIRECT_ROWS && dim % 32 == 0;
    s.range.clear(rows.count, dim);
    for (; walk.unit == unit && walk.start / RANGE_TOKENS == range; walk.next()) {
        rows.look(a, *unit, walk.start);
        attend_tile<T, Lanes>(tile_at<T>(a, *unit, walk.start), ahead.next(), rows, dim, a.scale * LOG2E, direct, s);
    }
#if defined(__AVX512F__)
    if constexpr (CAN_BE_DIRECT<T, Lanes>)
        for (int64_t d = 0; direct && d < rows.count * dim; d += 32) straighten(Lanes(), s.range.acc + d);
#endif
}

template <class T, class Lanes> void attend(const AttentionArgs& a, const AttentionUnit* first, const AttentionUnit* last, char* memory) {
    Walk walk(a, first, last);
    Ahead<T> ahead(a, first, last);
    int64_t group = a.heads / a.pool.kv_heads, dim = a.pool.head_dim;
    for (const AttentionUnit* unit = first; unit < last; ++unit) {
        Rows rows;
        rows.count = int(unit->queries * group);
        rows.group = group;
        Scratch s(memory, rows.count, dim);
        prepare<T, Lanes>(a, *unit, rows, s);
        s.total.clear(rows.count, dim);
        size_t partial_bytes = State::bytes(rows.count, dim);
        for (int range = unit->first_range; unit->partials && range < unit->last_range; ++range)
            State(unit->partials + range * partial_bytes, rows.count, dim).clear(rows.count, dim);
        while (walk.unit == unit) {
            int64_t range = walk.start / RANGE_TOKENS;
            attend_range<T, Lanes>(a, walk, ahead, rows, s);
            if (unit->partials) __builtin_memcpy(unit->partials + range * partial_bytes, s.range.acc, partial_bytes);
            else merge(s.total, s.range, rows.count, dim);
        }
        if (!unit->partials) write_rows<T>(a, *unit, group, s.total);
    }
}

template <class T> void merge_partials(const AttentionArgs& a, const AttentionUnit& u, char* memory) {
    int64_t group = a.heads / a.pool.kv_heads, rows = u.queries * group, dim = a.pool.head_dim;
    State total(memory, rows, dim);
    total.clear(rows, dim);
    for (int range = u.first_range; range < u.last_range; ++range) merge(total, State(u.partials + range * State::bytes(rows, dim), rows, dim), rows, dim);
    write_rows<T>(a, u, group, total);
}
