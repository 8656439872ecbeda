#include "kernels.h"
#include "packing.h"
#include "results.h"

namespace dilated_attention {
namespace {

constexpr int64_t kKeysOfChunk = 512;  // one piece of work
constexpr int64_t kColumns = kRowsOfStream;
constexpr int64_t kFewRows = 4;         // so few that products would mostly be of zeros
constexpr int64_t kKeysTogether = 4;    // whose values are added at once
constexpr int64_t kRowsAhead = 12;      // rows lie apart, where a processor does not foresee them

// Few queries and many keys, as in a step of decoding: keys and values are read once, where they lie if they are of the
// dtype of products, else copied row by row, a chunk at a time; keys are not transposed. Scores are computed transposed,
// [keys, queries], with keys as the left operand; of very few queries by a loop over the keys in place of products. Every
// chunk of keys has sums of its own, which are added up in their order.
template <class T>
class Stream {
  using C = Factor<T>;
  static constexpr int64_t kPairs = kPair<C>;

 public:
  Stream(const Partial& partial, const Masks& masks, const ForwardOperands& x)
      : p_(partial), masks_(masks), query_(x.query), key_(x.key, x.of_keys.row, x.of_keys.head), value_(x.value, x.of_keys.row, x.of_keys.head), results_(x, partial, masks),
        factor_(static_cast<float>(x.scale) * kLog2E), width_(rounded_up(partial.head_dim, kPairs)),
        positions_(partial.problems[0].count), rows_(positions_ * partial.ratio) {}

  void run() {
    const int64_t num_domains = p_.domains.size(), chunks = (p_.num_keys + kKeysOfChunk - 1) / kKeysOfChunk;
    const int64_t of_chunk = kColumns * (p_.head_dim + 2);
    Buffer<float> memory;
    float* sums = memory.at_least(num_domains * chunks * of_chunk);
    for_each_piece(num_domains * chunks, [&](const auto& next) {
      Scratch scratch(width_, p_.head_dim);
      for (int64_t piece; (piece = next()) >= 0;) {
        // Chunk by chunk, as rows of all heads lie together.
        const int64_t domain = piece % num_domains, chunk = piece / num_domains;
        const int64_t first = chunk * kKeysOfChunk, stop = std::min(first + kKeysOfChunk, p_.num_keys);
        float* of_piece = sums + (domain * chunks + chunk) * of_chunk;
        if (rows_ <= kFewRows)
          add_few(p_.domains[domain], first, stop, of_piece, scratch);
        else
          add(p_.domains[domain], first, stop, of_piece, scratch);
      }
      at::native::cpublas::brgemm_release(kPairs == 2);
    });
    for_each_piece(num_domains, [&](const auto& next) {
      std::vector<float> line(p_.head_dim);
      for (int64_t domain; (domain = next()) >= 0;)
        for (int64_t r = 0; r < rows_; r++) merge(p_.domains[domain], r, sums + domain * chunks * of_chunk, chunks, line);
    });
  }

 private:
  struct Scratch {
    std::vector<C> queries, queries_t, rows, values, probabilities;
    std::vector<float> scores, transposed, lines;
    Scratch(int64_t width, int64_t head_dim)
        : queries(kColumns * width), queries_t(kColumns * width), rows(kKeysOfChunk * width), values(kKeysOfChunk * head_dim),
          probabilities(kPairs == 2 ? kColumns * kKeysOfChunk : 0), scores(kKeysOfChunk * kColumns), transposed(kColumns * kKeysOfChunk),
          lines((kFewRows + kKeysTogether) * head_dim) {}
  };

  // Of these keys: sums of values [rows, head_dim], then the largest score and the total of every row.
  void add(const Domain& d, int64_t first, int64_t stop, float* sums, Scratch& s) const {
    const int64_t count = stop - first, keys = rounded_up(count, 16), head_dim = p_.head_dim;
    std::fill(s.queries.begin(), s.queries.end(), C(0));
    for (int64_t r = 0; r < rows_; r++)
      convert(query_.at(d.batch, row_of(d, r), d.head * p_.ratio + r % p_.ratio), s.queries.data() + r * width_, head_dim);
    pack_transposed(s.queries.data(), width_, s.queries_t.data(), kColumns, kColumns, width_);
    const bool is_whole = count == kKeysOfChunk && !hides_any(d, first, stop);
    const Matrix of_keys = rows_of(key_, d, first, count, keys, width_, is_whole, s);
    multiply(keys, kColumns, width_, of_keys.data, of_keys.ld, s.queries_t.data(), kColumns, s.scores.data(), kColumns, false);
    mask(d, first, count, keys, s.scores.data());
    exponentiate(keys, sums + kColumns * head_dim, s);
    Matrix of_values = rows_of(value_, d, first, count, keys, head_dim, is_whole, s);
    if constexpr (kPairs == 2) {
      pack_rows(of_values.data, of_values.ld, s.values.data(), keys, head_dim);
      of_values = {s.values.data(), head_dim};
    }
    multiply(rows_, head_dim, keys, probabilities_of(s), kKeysOfChunk, of_values.data, of_values.ld, sums, head_dim, false);
  }

  // A row in float32: where it lies, or converted into `line`.
  const float* floats(const T* row, float* line) const {
    if constexpr (std::is_same_v<T, float>) {
      return row;
    } else {
      convert(row, line, p_.head_dim);
      return line;
    }
  }

  void prefetch(const T* row) const {
    for (int64_t c = 0; c < p_.head_dim; c += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + c);
  }

  // The same as `add`, with scores as [queries, keys].
  void add_few(const Domain& d, int64_t first, int64_t stop, float* sums, Scratch& s) const {
    constexpr bool is_coarse = !std::is_same_v<T, float>;
    const int64_t count = stop - first, keys = rounded_up(count, kLanes), head_dim = p_.head_dim;
    float *queries = s.lines.data(), *lines = queries + kFewRows * head_dim, *tops = sums + kColumns * head_dim;
    for (int64_t r = 0; r < rows_; r++)
      convert(query_.at(d.batch, row_of(d, r), d.head * p_.ratio + r % p_.ratio), queries + r * head_dim, head_dim);
    for (int64_t x = 0; x < count; x++) {
      const int64_t row = p_.key_row(d, first + x);
      const bool is_hidden = masks_.hides(d, row);
      prefetch(key_.at(d.batch, p_.key_row(d, std::min(first + x + kRowsAhead, stop - 1)), d.head));
      const float* key = is_hidden ? nullptr : floats(key_.at(d.batch, row, d.head), lines);
      for (int64_t r = 0; r < rows_; r++)
        s.scores[r * kKeysOfChunk + x] = is_hidden ? -kInfinity : dot(key, queries + r * head_dim, head_dim);
    }
    for (int64_t r = 0; r < rows_; r++) {
      float* scores = s.scores.data() + r * kKeysOfChunk;
      const int64_t i = r / p_.ratio - first;
      const int64_t low = std::clamp(i + p_.low, int64_t{0}, count), high = std::clamp(i + p_.high + 1, low, count);
      std::fill(scores, scores + low, -kInfinity);
      std::fill(scores + high, scores + keys, -kInfinity);
      Floats most(-kInfinity), total(0.0f);
      for (int64_t x = 0; x < keys; x += kLanes) most = at::vec::maximum(most, Floats::loadu(scores + x));
      tops[r] = largest(most);
      const Floats safe(tops[r] == -kInfinity ? 0.0f : tops[r]), factor(factor_);
      for (int64_t x = 0; x < keys; x += kLanes) {
        const Floats power = exp2<is_coarse>((Floats::loadu(scores + x) - safe) * factor);
        power.store(scores + x);
        total = total + power;
      }
      tops[kColumns + r] = sum_of(total);
    }
    std::fill_n(sums, rows_ * head_dim, 0.0f);
    for (int64_t x = 0; x < count; x += kKeysTogether) {
      const float* values[kKeysTogether];
      float powers[kFewRows][kKeysTogether] = {};
      for (int64_t y = 0; y < kKeysTogether; y++) {
        const int64_t row = p_.key_row(d, first + x + y);
        prefetch(value_.at(d.batch, p_.key_row(d, std::min(first + x + y + kRowsAhead, stop - 1)), d.head));
        // What is not there counts as zeros.
        const bool is_seen = x + y < count && !masks_.hides(d, row);
        float* line = lines + y * head_dim;
        if (!is_seen) std::fill_n(line, head_dim, 0.0f);
        values[y] = is_seen ? floats(value_.at(d.batch, row, d.head), line) : line;
        for (int64_t r = 0; r < rows_ && is_seen; r++) powers[r][y] = s.scores[r * kKeysOfChunk + x + y];
      }
      for (int64_t r = 0; r < rows_; r++) add_weighted(powers[r], values, sums + r * head_dim);
    }
  }

  void add_weighted(const float* powers, const float* const* values, float* sums) const {
    int64_t c = 0;
    for (; c + kLanes <= p_.head_dim; c += kLanes) {
      Floats sum = Floats::loadu(sums + c);
      for (int64_t y = 0; y < kKeysTogether; y++) sum = at::vec::fmadd(Floats(powers[y]), Floats::loadu(values[y] + c), sum);
      sum.store(sums + c);
    }
    for (; c < p_.head_dim; c++)
      for (int64_t y = 0; y < kKeysTogether; y++) sums[c] += powers[y] * values[y][c];
  }

  struct Matrix {
    const C* data;
    int64_t ld;
  };

  // Rows of keys or values where they lie, if all of a chunk are seen and nothing is to be converted; else a copy.
  Matrix rows_of(
      const Rows<const T>& from, const Domain& d, int64_t first, int64_t count, int64_t keys, int64_t width, bool is_whole,
      Scratch& s) const {
    if constexpr (std::is_same_v<T, C>)
      if (is_whole && width == p_.head_dim)
        return {from.at(d.batch, p_.key_row(d, first), d.head), from.row_stride() * p_.key_step};
    copy(from, d, first, count, keys, width, s.rows.data());
    return {s.rows.data(), width};
  }

  bool hides_any(const Domain& d, int64_t first, int64_t stop) const {
    for (int64_t x = first; x < stop && masks_.hidden; x++)
      if (masks_.hides(d, p_.key_row(d, x))) return true;
    return false;
  }

  int64_t row_of(const Domain& d, int64_t r) const { return p_.query_row(d, p_.problems[0], r / p_.ratio); }

  static C* probabilities_of(Scratch& s) {
    if constexpr (kPairs == 2)
      return s.probabilities.data();
    else
      return s.transposed.data();
  }

  void copy(const Rows<const T>& from, const Domain& d, int64_t first, int64_t count, int64_t keys, int64_t width, C* to) const {
    for (int64_t x = 0; x < keys; x++, to += width) {
      const int64_t row = p_.key_row(d, first + x);
      const bool is_read = x < count && !masks_.hides(d, row);
      if (is_read) convert(from.at(d.batch, row, d.head), to, p_.head_dim);
      std::fill(is_read ? to + p_.head_dim : to, to + width, C(0));
    }
  }

  void mask(const Domain& d, int64_t first, int64_t count, int64_t keys, float* scores) const {
    const bool is_banded = positions_ - 1 + p_.low > first || p_.high < first + count - 1;
    for (int64_t x = 0; x < keys; x++, scores += kColumns) {
      if (x >= count || masks_.hides(d, p_.key_row(d, first + x))) {
        std::fill(scores, scores + kColumns, -kInfinity);
      } else if (is_banded) {
        const int64_t low = std::clamp<int64_t>((first + x - p_.high) * p_.ratio, 0, kColumns);
        const int64_t high = std::clamp<int64_t>((first + x - p_.low + 1) * p_.ratio, low, kColumns);
        std::fill(scores, scores + low, -kInfinity);
        std::fill(scores + high, scores + kColumns, -kInfinity);
      }
    }
  }

  // Powers of two of the scores of every query, less its largest, as rows; `tops`: the largest, then the totals.
  void exponentiate(int64_t keys, float* tops, Scratch& s) const {
    constexpr bool is_coarse = !std::is_same_v<T, float>;
    const Floats factor(factor_);
    for (int64_t c = 0; c < kColumns; c += kLanes) {
      Floats top(-kInfinity), total(0.0f);
      for (int64_t x = 0; x < keys; x++) top = at::vec::maximum(top, Floats::loadu(s.scores.data() + x * kColumns + c));
      const Floats safe = Floats::blendv(top, Floats(0.0f), top == Floats(-kInfinity));
      for (int64_t x = 0; x < keys; x++) {
        float* score = s.scores.data() + x * kColumns + c;
        const Floats power = exp2<is_coarse>((Floats::loadu(score) - safe) * factor);
        power.store(score);
        total = total + power;
      }
      top.store(tops + c);
      total.store(tops + kColumns + c);
    }
    transpose(s.scores.data(), kColumns, s.transposed.data(), kKeysOfChunk, keys, kColumns);
    if constexpr (kPairs == 2)
      for (int64_t r = 0; r < rows_; r++) convert(s.transposed.data() + r * kKeysOfChunk, s.probabilities.data() + r * kKeysOfChunk, keys);
  }

  void merge(const Domain& d, int64_t r, const float* sums, int64_t chunks, std::vector<float>& line) const {
    const int64_t head_dim = p_.head_dim, of_chunk = kColumns * (head_dim + 2);
    float top = -kInfinity, total = 0.0f;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const float of_top = sums[chunk * of_chunk + kColumns * head_dim + r];
      if (!(of_top <= top)) top = of_top;  // a NaN is the largest
      if (std::isnan(top)) break;
    }
    if (top == -kInfinity) return;  // it sees none of these keys
    std::fill(line.begin(), line.end(), 0.0f);
    for (int64_t chunk = 0; chunk < chunks; chunk++, sums += of_chunk) {
      const float of_top = sums[kColumns * head_dim + r], weight = of_top == top ? 1.0f : exp2f((of_top - top) * factor_);
      if (weight == 0.0f) continue;
      total += weight * sums[kColumns * (head_dim + 1) + r];
      for (int64_t c = 0; c < head_dim; c++) line[c] += weight * sums[r * head_dim + c];
    }
    results_.merge(d.batch, row_of(d, r), d.head * p_.ratio + r % p_.ratio, line.data(), top * (factor_ * kLn2), total);
  }

  const Partial& p_;
  const Masks& masks_;
  const Rows<const T> query_, key_, value_;
  const Results<T> results_;
  const float factor_;
  const int64_t width_, positions_, rows_;
};

}  // namespace

void stream(const Partial& partial, const Masks& masks, const ForwardOperands& operands) {
  switch (operands.query.scalar_type()) {
    case at::kFloat: return Stream<float>(partial, masks, operands).run();
    case at::kBFloat16: return Stream<BFloat16>(partial, masks, operands).run();
    default: return Stream<Half>(partial, masks, operands).run();
  }
}

}  // namespace dilated_attention
