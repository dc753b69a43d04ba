// Attention of a chunk over the path stack and its own tree, on a CPU; called by `kernel.py`.
//
// FlashAttention-2 (Dao, 2023, algorithms 1 and 2), restricted to the pairs that are read. Queries are processed in
// blocks, in which the query heads of a key head are rows of one matrix product; the keys of a block in tiles. The last
// tile ends with the block's last token, or the last one of its unit, keys that no query of the block reads are in no tile, and short runs of keys
// are copied to contiguous memory. Matrix products call torch's BLAS from threads of an OpenMP region; a BLAS that
// shares torch's OpenMP notices that and starts no threads of its own.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t ROWS = 128;  // rows of a block: its queries times the heads of a group
constexpr int64_t FEWEST = 8;  // fewest queries of a block when blocks are halved to occupy all threads
constexpr int64_t KEYS = 256;  // most keys of a tile
constexpr int64_t SHORT = 64;  // shorter runs of keys share a tile and are copied; longer ones are read in place
constexpr int64_t MOST_SUMS = int64_t{1} << 30;  // bytes of partial gradients of keys and values, besides the gradients
constexpr double EVEN = 1.15;  // accepted ratio of the time to that with all threads busy

// A tensor `[heads, tokens, features]`; the features of a token are contiguous, and tokens do not overlap.
struct Tensor {
  void* data;
  int64_t of_head, of_token;  // strides in elements
  int64_t first;              // the token at `data`

  template <class T>
  T* row(int64_t head, int64_t token) const {
    return static_cast<T*>(data) + head * of_head + (token - first) * of_token;
  }
};

// Keys and values of the chunk and of the stack below it, or their gradients.
struct States {
  Tensor key, value, prefix_key, prefix_value;
};

// Sizes have 64 bits; a BLAS with 32-bit sizes reads the lower half.
using Gemm = void (*)(const char*, const char*, const int64_t*, const int64_t*, const int64_t*, const void*,
                      const void*, const int64_t*, const void*, const int64_t*, const void*, void*, const int64_t*);

}  // namespace

extern "C" struct Call {  // filled by `kernel.py`, field by field
  int64_t heads, kv_heads, tokens, width, start, threads;
  int64_t limit, by_chunks;       // see `Limit`; 0: none
  const int32_t *begins, *ends, *depths;  // see `Keys`; `begins` ascends
  double scale;
  Gemm gemm;
  Tensor query;
  States states;
  Tensor out, logsumexp;
  Tensor grad, grad_query;
  States grads;  // accumulated into
};

namespace {

struct Run {  // consecutive keys
  int64_t first, count;
  bool in_prefix;
};

struct Tile {
  size_t begin, end;  // its runs
  int64_t keys;
  bool masked;  // whether some query of the block does not read some key
};

struct Block {
  int64_t first, last;  // its queries
  size_t begin, end;    // its tiles
};

struct Plan {
  std::vector<Block> blocks;
  std::vector<Tile> tiles;
  std::vector<Run> runs;
  int64_t above;  // the first key of the prefix that is read
};

// The smallest depth that a token reads, given the limit.
int64_t lowest(const Call& call, int64_t token) {
  const int64_t depth = call.depths[token];
  return call.by_chunks ? depth / call.limit * call.limit : depth - call.limit + 1;
}

void add_keys(Plan& plan, const Block& block, Run run, bool masked) {
  while (run.count > 0) {
    bool follows = false, joins = false;
    if (plan.tiles.size() > block.begin && plan.tiles.back().keys < KEYS) {
      const Run& latest = plan.runs.back();
      follows = latest.in_prefix == run.in_prefix && latest.first + latest.count == run.first;
      joins = follows || std::max(latest.count, run.count) < SHORT;
    }
    if (!joins) plan.tiles.push_back({plan.runs.size(), plan.runs.size(), 0, false});
    if (!follows) plan.runs.push_back({run.first, 0, run.in_prefix});
    Tile& tile = plan.tiles.back();
    const int64_t added = std::min(KEYS - tile.keys, run.count);
    plan.runs.back().count += added;
    tile = {tile.begin, plan.runs.size(), tile.keys + added, tile.masked || masked};
    run.first += added;
    run.count -= added;
  }
}

Plan plan_of(const Call& call) {
  int64_t rows = std::max<int64_t>(ROWS / (call.heads / call.kv_heads), 1);
  while (rows >= 2 * FEWEST && (call.tokens + rows - 1) / rows * call.kv_heads < call.threads) rows /= 2;
  Plan plan{{}, {}, {}, call.start};
  for (int64_t first = 0; first < call.tokens; first += rows) {
    Block block{first, std::min(first + rows, call.tokens), plan.tiles.size(), 0};
    int64_t some = 0, all = 0;  // smallest depths that some query of the block reads, and that all queries read
    if (call.limit) {
      some = std::numeric_limits<int64_t>::max();
      for (int64_t token = first; token < block.last; token++) {
        some = std::min(some, std::max<int64_t>(lowest(call, token), 0));
        all = std::max(all, lowest(call, token));
      }
    }
    const int64_t above = std::min(some, call.start), whole = std::clamp(all, above, call.start);
    plan.above = std::min(plan.above, above);
    add_keys(plan, block, {above, whole - above, true}, true);
    add_keys(plan, block, {whole, call.start - whole, true}, false);
    // The tokens that read a key are contiguous: from its begin, the key itself or the first token of its unit, to its
    // end. Keys of a unit may follow the block.
    const int64_t after = std::lower_bound(call.begins, call.begins + call.tokens, block.last) - call.begins;
    const auto read = [&](int64_t key) { return call.ends[key] > first && (!call.limit || call.depths[key] >= some); };
    const auto read_by_all = [&](int64_t key) {
      return call.begins[key] <= first && call.ends[key] >= block.last && (!call.limit || call.depths[key] >= all);
    };
    for (int64_t key = 0; key < after;) {
      const int64_t begin = key++;
      if (!read(begin)) continue;
      const bool by_all = read_by_all(begin);
      while (key < after && read(key) && read_by_all(key) == by_all) key++;
      add_keys(plan, block, {begin, key - begin, false}, !by_all);
    }
    block.end = plan.tiles.size();
    plan.blocks.push_back(block);
  }
  return plan;
}

template <class T>
inline T multiply_add(T a, T b, T c) {
#if defined(__FMA__) || defined(__aarch64__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// The series 1 + x + x^2 / 2 + ... up to the power `TERMS` by Horner's rule: its terms from the power `TERM` - 1 on,
// divided by the first of them.
template <int TERM, int TERMS, class T>
inline T series(T x) {
  if constexpr (TERM < TERMS)
    return multiply_add(series<TERM + 1, TERMS>(x), x * T(1.0 / TERM), T(1));
  else
    return multiply_add(x, T(1.0 / TERM), T(1));
}

// e^x as 2^n times the series of the remainder, with ln 2 split into two parts [Cody, Waite, 1980]; 0 where the result
// would be subnormal. x is at most slightly above 0; NaN stays NaN.
inline float exponential(float x) {
  const float n = std::rint((x > -87.0f ? x : -87.0f) * 1.44269504f);
  const float rest = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, x));
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : series<1, 7>(rest) * power;
}

inline double exponential(double x) {
  const double n = std::rint((x > -708.0 ? x : -708.0) * 1.44269504088896340736);
  const double rest = multiply_add(n, -1.42860682030941723212e-6, multiply_add(n, -6.93145751953125e-1, x));
  const uint64_t bits = static_cast<uint64_t>(static_cast<int32_t>(n) + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -708.0 ? 0.0 : series<1, 13>(rest) * power;
}

template <class T>
inline bool is_finite(const T* numbers, int64_t count) {
  int others = 0;
#pragma omp simd reduction(| : others)
  for (int64_t i = 0; i < count; i++) others |= !(std::abs(numbers[i]) <= std::numeric_limits<T>::max());
  return !others;
}

template <class T>
class Attention {
 public:
  explicit Attention(const Call& call)
      : call_(call), plan_(plan_of(call)), group_(call.heads / call.kv_heads), width_(call.width) {
    for (const Block& block : plan_.blocks) rows_ = std::max(rows_, (block.last - block.first) * group_);
#ifdef _OPENMP
    threads_ = call.threads;
#endif
    const int64_t fits = 1 + MOST_SUMS / std::max<int64_t>(2 * sums_of_a_part() * sizeof(T), 1);
    const int64_t most = std::min<int64_t>(plan_.blocks.size(), fits);
    parts_ = std::clamp<int64_t>(threads_ / call.kv_heads, 1, most);
    while (parts_ < most && !is_even(parts_ * call.kv_heads)) parts_++;
  }

  void forward() const {
    const std::unique_ptr<T[]> owned(new T[threads_ * numbers()]);
    T* const scratch = owned.get();
    const int64_t count = plan_.blocks.size();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_)
    for (int64_t unit = 0; unit < call_.kv_heads * count; unit++) {  // blocks with many keys first
      Buffers buffers(*this, scratch);
      forward(plan_.blocks[count - 1 - unit / call_.kv_heads], unit % call_.kv_heads, buffers);
    }
  }

  // A unit of work is a key head; for load balance, each head's blocks are split into `parts_`. Each part has its own
  // sums of gradients of keys and values, the first one directly in the result.
  void backward() const {
    const std::unique_ptr<T[]> owned(new T[threads_ * numbers() + (parts_ - 1) * 2 * sums_of_a_part()]);
    T *const scratch = owned.get(), *const sums = scratch + threads_ * numbers();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_)
    for (int64_t unit = 0; unit < call_.kv_heads * parts_; unit++) {
      const int64_t part = unit / call_.kv_heads, head = unit % call_.kv_heads;
      const States grads = grads_of(part, sums);
      if (part) {
        std::fill_n(grads.prefix_key.row<T>(head, plan_.above), places() * width_, T(0));
        std::fill_n(grads.prefix_value.row<T>(head, plan_.above), places() * width_, T(0));
      }
      Buffers buffers(*this, scratch);
      const int64_t count = plan_.blocks.size();
      for (int64_t turn = 0; turn * parts_ < count; turn++) {  // in zigzag order, since later blocks have more keys
        const int64_t block = turn * parts_ + (turn % 2 ? parts_ - 1 - part : part);
        if (block < count) backward(plan_.blocks[block], head, grads, buffers);
      }
    }
    const int64_t units = parts_ > 1 ? call_.kv_heads * places() : 0;
#pragma omp parallel for schedule(static) num_threads(threads_)
    for (int64_t unit = 0; unit < units; unit++) {
      const int64_t head = unit / places(), place = plan_.above + unit % places();
      const Run run{place < call_.start ? place : place - call_.start, 1, place < call_.start};
      for (int64_t part = 1; part < parts_; part++) {
        const States grads = grads_of(part, sums);
        add(keys(call_.grads, run, head).data, keys(grads, run, head).data);
        add(values(call_.grads, run, head).data, values(grads, run, head).data);
      }
    }
  }

 private:
  struct Rows {
    T* data;
    int64_t stride;
  };

  struct Buffers {  // scratch memory of the current thread
    T *query, *grad, *sum, *scores, *of_scores, *keys, *values, *of_keys, *of_values, *top, *total;
    std::array<int32_t, KEYS> firsts, ends, depths;

    Buffers(const Attention& a, T* scratch) {
#ifdef _OPENMP
      scratch += omp_get_thread_num() * a.numbers();
#endif
      for (T** one : {&query, &grad, &sum}) *one = scratch, scratch += a.rows_ * a.width_;
      for (T** one : {&scores, &of_scores}) *one = scratch, scratch += a.rows_ * KEYS;
      for (T** one : {&keys, &values, &of_keys, &of_values}) *one = scratch, scratch += KEYS * a.width_;
      for (T** one : {&top, &total}) *one = scratch, scratch += a.rows_;
    }
  };

  int64_t numbers() const { return rows_ * (3 * width_ + 2 * KEYS + 2) + KEYS * 4 * width_; }  // size of `Buffers`
  int64_t places() const { return call_.start - plan_.above + call_.tokens; }  // keys that are read
  int64_t sums_of_a_part() const { return call_.kv_heads * places() * width_; }

  // Whether this number of units of work keeps nearly all threads busy to the end.
  bool is_even(int64_t units) const {
    return (units + threads_ - 1) / threads_ * threads_ <= EVEN * static_cast<double>(units);
  }

  // Where a part accumulates gradients of keys and values.
  States grads_of(int64_t part, T* sums) const {
    if (part == 0) return call_.grads;
    const int64_t of_head = places() * width_, above = (call_.start - plan_.above) * width_;
    T* const key = sums + (part - 1) * 2 * sums_of_a_part();
    T* const value = key + sums_of_a_part();
    return {{key + above, of_head, width_, 0}, {value + above, of_head, width_, 0},
            {key, of_head, width_, plan_.above}, {value, of_head, width_, plan_.above}};
  }

  static Rows rows(const Tensor& tensor, const Run& run, int64_t head) {
    return {tensor.row<T>(head, run.first), tensor.of_token};
  }
  static Rows keys(const States& states, const Run& run, int64_t head) {
    return rows(run.in_prefix ? states.prefix_key : states.key, run, head);
  }
  static Rows values(const States& states, const Run& run, int64_t head) {
    return rows(run.in_prefix ? states.prefix_value : states.value, run, head);
  }

  bool are_finite(const Rows& rows, int64_t count) const {
    bool all = true;
    for (int64_t row = 0; row < count && all; row++) all = is_finite(rows.data + row * rows.stride, width_);
    return all;
  }

  bool is_one_run(const Tile& tile) const { return tile.end - tile.begin == 1; }

  // The rows of a tile: in place if they are one run, otherwise copied to contiguous memory.
  template <class Of>
  Rows gathered(const Tile& tile, int64_t head, T* copies, Of of) const {
    if (is_one_run(tile)) return of(call_.states, plan_.runs[tile.begin], head);
    T* to = copies;
    for (size_t number = tile.begin; number < tile.end; number++) {
      const Rows from = of(call_.states, plan_.runs[number], head);
      for (int64_t row = 0; row < plan_.runs[number].count; row++, to += width_)
        std::copy_n(from.data + row * from.stride, width_, to);
    }
    return {copies, width_};
  }

  // Add left^T right to the gradients of a tile's rows.
  template <class Of>
  void add_product(const Tile& tile, int64_t head, const States& grads, T* products, Of of, const T* left,
                   const T* right, int64_t rows) const {
    const bool in_place = is_one_run(tile);
    const Rows to = in_place ? of(grads, plan_.runs[tile.begin], head) : Rows{products, width_};
    gemm(true, false, tile.keys, width_, rows, {const_cast<T*>(left), tile.keys}, {const_cast<T*>(right), width_},
         in_place, to);
    for (size_t number = tile.begin; number < tile.end && !in_place; number++) {
      const Rows own = of(grads, plan_.runs[number], head);
      for (int64_t row = 0; row < plan_.runs[number].count; row++, products += width_)
        add(own.data + row * own.stride, products);
    }
  }

  void add(T* to, const T* added) const {
    for (int64_t i = 0; i < width_; i++) to[i] += added[i];
  }

  // Add a multiple; a factor of zero adds nothing, even for NaN or infinity.
  void add(T* to, T factor, const T* added) const {
    if (factor == 0) return;
#pragma omp simd
    for (int64_t i = 0; i < width_; i++) to[i] += factor * added[i];
  }

  // The products of a tile pair by pair, for tiles with NaN or infinity: a matrix product would multiply pairs that are
  // not read by zero, and 0 * NaN is NaN.
  void add_values(const Tile& tile, const Rows& value, int64_t rows, Buffers& on) const {
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = 0; i < tile.keys; i++)
        add(on.sum + row * width_, on.scores[row * tile.keys + i], value.data + i * value.stride);
  }

  void add_gradients(const Tile& tile, int64_t head, const States& grads, const Rows& key, int64_t rows,
                     Buffers& on) const {
    int64_t column = 0;
    for (size_t number = tile.begin; number < tile.end; number++) {
      const Run& run = plan_.runs[number];
      const Rows of_key = keys(grads, run, head), of_value = values(grads, run, head);
      for (int64_t i = 0; i < run.count; i++, column++)
        for (int64_t row = 0; row < rows; row++) {
          const T weight = on.scores[row * tile.keys + column], of_score = on.of_scores[row * tile.keys + column];
          add(of_value.data + i * of_value.stride, weight, on.grad + row * width_);
          add(of_key.data + i * of_key.stride, of_score, on.query + row * width_);
          add(on.sum + row * width_, of_score, key.data + column * key.stride);
        }
    }
  }

  // result = left right, or result += left right if `adds`; `[m, k]` times `[k, n]`, each optionally transposed.
  void gemm(bool left_transposed, bool right_transposed, int64_t m, int64_t n, int64_t k, Rows left, Rows right,
            bool adds, Rows result) const {
    const T one = 1, kept = adds ? 1 : 0;  // BLAS is column-major
    call_.gemm(right_transposed ? "T" : "N", left_transposed ? "T" : "N", &n, &m, &k, &one, right.data, &right.stride,
               left.data, &left.stride, &kept, result.data, &result.stride);
  }

  // Fill in which queries read each key of a tile: those from its first to its end, if their limit reaches its depth.
  void describe(const Tile& tile, Buffers& on) const {
    int64_t column = 0;
    for (size_t number = tile.begin; number < tile.end; number++) {
      const Run& run = plan_.runs[number];
      for (int64_t key = run.first; key < run.first + run.count; key++, column++) {
        on.firsts[column] = run.in_prefix ? 0 : call_.begins[key];
        on.ends[column] = run.in_prefix ? std::numeric_limits<int32_t>::max() : call_.ends[key];
        on.depths[column] = run.in_prefix ? static_cast<int32_t>(key) : call_.depths[key];
      }
    }
  }

  void mask(T* scores, int64_t keys, int64_t query, Buffers& on) const {
    const int32_t *firsts = on.firsts.data(), *ends = on.ends.data(), *depths = on.depths.data();
    const int32_t token = static_cast<int32_t>(query);
    const int32_t low = static_cast<int32_t>(call_.limit ? lowest(call_, query) : 0);
    const T none = -std::numeric_limits<T>::infinity();
#pragma omp simd
    for (int64_t i = 0; i < keys; i++)
      scores[i] = ((firsts[i] <= token) & (token < ends[i]) & (depths[i] >= low)) ? scores[i] : none;
  }

  // Copy the scaled queries of a block to rows ordered by head, then token, and call `read` for each row.
  template <class Read>
  int64_t pack(const Block& block, int64_t head, Buffers& on, Read read) const {
    int64_t row = 0;
    for (int64_t one = head * group_; one < (head + 1) * group_; one++)
      for (int64_t token = block.first; token < block.last; token++, row++) {
        const T* const query = call_.query.row<T>(one, token);
        for (int64_t i = 0; i < width_; i++) on.query[row * width_ + i] = query[i] * T(call_.scale);
        read(row, one, token);
      }
    return row;
  }

  // Compute the scores of a block's rows with a tile's keys; -infinity for pairs that are not read.
  void score(const Block& block, const Tile& tile, const Rows& key, int64_t rows, Buffers& on) const {
    gemm(false, true, rows, tile.keys, width_, {on.query, width_}, key, false, {on.scores, tile.keys});
    if (!tile.masked) return;
    describe(tile, on);
    const int64_t queries = block.last - block.first;
    for (int64_t row = 0; row < rows; row++)
      mask(on.scores + row * tile.keys, tile.keys, block.first + row % queries, on);
  }

  void forward(const Block& block, int64_t head, Buffers& on) const {
    const T none = -std::numeric_limits<T>::infinity();
    const int64_t rows = pack(block, head, on, [&](int64_t row, int64_t, int64_t) {
      on.top[row] = none;
      on.total[row] = 0;
    });
    for (size_t number = block.begin; number < block.end; number++) {
      const Tile& tile = plan_.tiles[number];
      const bool adds = number > block.begin;
      score(block, tile, gathered(tile, head, on.keys, keys), rows, on);
      for (int64_t row = 0; row < rows; row++) {
        T* const scores = on.scores + row * tile.keys;
        T top = on.top[row], total = 0;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < tile.keys; i++) top = scores[i] > top ? scores[i] : top;
        const T base = top == none ? 0 : top;  // 0 if all keys so far are masked
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < tile.keys; i++) {
          scores[i] = exponential(scores[i] - base);
          total += scores[i];
        }
        const T share = exponential(on.top[row] - base);
        on.total[row] = on.total[row] * share + total;
        on.top[row] = top;
        for (int64_t i = 0; i < width_ && adds; i++) on.sum[row * width_ + i] *= share;
      }
      const Rows value = gathered(tile, head, on.values, values);
      if (tile.masked && !are_finite(value, tile.keys)) {
        if (!adds) std::fill_n(on.sum, rows * width_, T(0));
        add_values(tile, value, rows, on);
      } else {
        gemm(false, false, rows, width_, tile.keys, {on.scores, tile.keys}, value, adds, {on.sum, width_});
      }
    }
    unpack(block, head, [&](int64_t row, int64_t one, int64_t token) {
      T* const out = call_.out.row<T>(one, token);
      for (int64_t i = 0; i < width_; i++) out[i] = on.sum[row * width_ + i] / on.total[row];
      *call_.logsumexp.row<T>(one, token) = on.top[row] + std::log(on.total[row]);
    });
  }

  // Compute weights and gradients of scores from scores and gradients of weights; zero for pairs that are not read,
  // even if the row has NaN elsewhere.
  template <bool MASKED>
  void weigh(const Tile& tile, int64_t rows, Buffers& on) const {
    const T none = -std::numeric_limits<T>::infinity();
    for (int64_t row = 0; row < rows; row++) {
      T *const weights = on.scores + row * tile.keys, *const of_scores = on.of_scores + row * tile.keys;
      const T logsumexp = on.top[row], delta = on.total[row];
#pragma omp simd
      for (int64_t i = 0; i < tile.keys; i++) {
        const bool read = !MASKED || weights[i] != none;
        weights[i] = read ? exponential(weights[i] - logsumexp) : 0;
        of_scores[i] = read ? weights[i] * (of_scores[i] - delta) : 0;
      }
    }
  }

  void backward(const Block& block, int64_t head, const States& grads, Buffers& on) const {
    T *const logsumexps = on.top, *const deltas = on.total;
    const int64_t rows = pack(block, head, on, [&](int64_t row, int64_t one, int64_t token) {
      const T *const grad = call_.grad.row<T>(one, token), *const out = call_.out.row<T>(one, token);
      T delta = 0;
#pragma omp simd reduction(+ : delta)
      for (int64_t i = 0; i < width_; i++) {
        on.grad[row * width_ + i] = grad[i];
        delta += grad[i] * out[i];
      }
      deltas[row] = delta;
      logsumexps[row] = *call_.logsumexp.row<T>(one, token);
    });
    const bool own_finite = are_finite({on.query, width_}, rows) && are_finite({on.grad, width_}, rows);
    for (size_t number = block.begin; number < block.end; number++) {
      const Tile& tile = plan_.tiles[number];
      const Rows key = gathered(tile, head, on.keys, keys), value = gathered(tile, head, on.values, values);
      score(block, tile, key, rows, on);
      gemm(false, true, rows, tile.keys, width_, {on.grad, width_}, value, false, {on.of_scores, tile.keys});
      if (tile.masked)
        weigh<true>(tile, rows, on);
      else
        weigh<false>(tile, rows, on);
      if (tile.masked && !(own_finite && are_finite(key, tile.keys))) {
        if (number == block.begin) std::fill_n(on.sum, rows * width_, T(0));
        add_gradients(tile, head, grads, key, rows, on);
        continue;
      }
      add_product(tile, head, grads, on.of_values, values, on.scores, on.grad, rows);
      add_product(tile, head, grads, on.of_keys, keys, on.of_scores, on.query, rows);
      gemm(false, false, rows, width_, tile.keys, {on.of_scores, tile.keys}, key, number > block.begin,
           {on.sum, width_});
    }
    unpack(block, head, [&](int64_t row, int64_t one, int64_t token) {
      T* const grad = call_.grad_query.row<T>(one, token);
      for (int64_t i = 0; i < width_; i++) grad[i] = on.sum[row * width_ + i] * T(call_.scale);
    });
  }

  template <class Write>
  void unpack(const Block& block, int64_t head, Write write) const {
    int64_t row = 0;
    for (int64_t one = head * group_; one < (head + 1) * group_; one++)
      for (int64_t token = block.first; token < block.last; token++, row++) write(row, one, token);
  }

  const Call& call_;
  const Plan plan_;
  const int64_t group_, width_;
  int64_t rows_ = 0, parts_ = 1, threads_ = 1;
};

// Run a function; return false if it runs out of memory.
template <class Run>
bool done(Run run) {
  try {
    run();
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

}  // namespace

#define FUNCTIONS(NAME, T)                                                                                      \
  extern "C" bool forward_##NAME(const Call* call) { return done([&] { Attention<T>(*call).forward(); }); }     \
  extern "C" bool backward_##NAME(const Call* call) { return done([&] { Attention<T>(*call).backward(); }); }

FUNCTIONS(float32, float)
FUNCTIONS(float64, double)
