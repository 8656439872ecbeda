#include "kernels.h"
#include "packing.h"
#include "results.h"

namespace dilated_attention {
namespace {

constexpr int64_t kKeysOfChunk = 512;  // one piece of work
constexpr int64_t kColumns = kRowsOfStream;
constexpr int64_t kFewRows = 4;         // so few that products would consist mostly of zeros
constexpr int64_t kDomainsTogether = 8;  // domains with few rows, whose keys are read in turn
constexpr int64_t kBytesAhead = 8 << 10;  // prefetch distance

// Few queries and many keys, as in decoding: keys and values are read once, in place if they have the type of factors,
// otherwise copied row by row, a chunk at a time; keys are not transposed. Scores are computed transposed,
// [keys, queries], with keys as the left operand; for very few queries by a loop over the keys instead of products.
// Every chunk of keys has its own sums, which are added up in order.
template <class T>
class Stream {
  using C = Factor<T>;
  using Numbers = at::vec::Vectorized<T>;
  static constexpr int64_t kPairs = kPair<C>;

 public:
  Stream(const Partial& partial, const Masks& masks, const ForwardOperands& x)
      : p_(partial), masks_(masks), terms_(x.terms), has_terms_(x.terms.are_present()), query_(x.query),
        key_(x.key, x.of_keys.row, x.of_keys.head), value_(x.value, x.of_keys.row, x.of_keys.head), results_(x, partial, masks),
        factor_(x.terms.factor()), of_gate_(double{kLog2E} / factor_), width_(rounded_up(partial.head_dim, kPairs)),
        query_width_(rounded_up(partial.head_dim, 2 * kLanes)), sum_width_(rounded_up(partial.value_dim, 2 * kLanes)),
        position_(partial.problems[0].position),
        positions_(partial.problems[0].count), rows_(positions_ * partial.ratio) {}

  void run() {
    const int64_t num_domains = p_.domains.size(), of_chunk = rows_ * sum_width_ + 2 * kColumns;
    int64_t most = p_.lists.empty() ? p_.num_keys : 0;
    for (const List& list : p_.lists) most = std::max(most, list.count * p_.unit);
    const int64_t chunks = (most + kKeysOfChunk - 1) / kKeysOfChunk;
    Buffer<float> memory;
    float* sums = memory.at_least(num_domains * chunks * of_chunk);
    // Chunk by chunk, as the rows of all heads are adjacent.
    const int64_t together = rows_ <= kFewRows ? kDomainsTogether : 1, groups = (num_domains + together - 1) / together;
    const int64_t of_pair = p_.head_dim + p_.value_dim;
    const double bytes = 1.0 * num_domains * most * of_pair * sizeof(T), operations = 2.0 * of_pair * p_.pairs();
    for_each_piece(groups * chunks, threads_for(operations, bytes), [&](const auto& next) {
      const WithoutSubnormals normal(terms_);
      std::optional<Scratch> scratch;
      Few memory_of_few;
      std::vector<Keys> keys(together);
      for (int64_t piece; (piece = next()) >= 0;) {
        const int64_t domain = piece % groups * together, chunk = piece / groups, some = std::min(together, num_domains - domain);
        float* of_piece = sums + (domain * chunks + chunk) * of_chunk;
        for (int64_t i = 0; i < some; i++) find(p_.domains[domain + i], chunk * kKeysOfChunk, keys[i]);
        const auto few = [&](auto rows) { add_few<rows>(keys.data(), some, of_piece, chunks * of_chunk, memory_of_few); };
        switch (rows_) {
          case 1: few(std::integral_constant<int, 1>()); break;
          case 2: few(std::integral_constant<int, 2>()); break;
          case 3: few(std::integral_constant<int, 3>()); break;
          case 4: few(std::integral_constant<int, 4>()); break;
          default:
            if (!scratch) scratch.emplace(width_, p_.value_dim);
            add(keys[0], of_piece, *scratch);
        }
      }
      at::native::cpublas::brgemm_release(kPairs == 2);
    });
    for_each_piece(num_domains, threads_for(0.0, sizeof(float) * num_domains * chunks * of_chunk), [&](const auto& next) {
      std::vector<float> line(p_.value_dim);
      for (int64_t domain; (domain = next()) >= 0;)
        for (int64_t r = 0; r < rows_; r++) merge(p_.domains[domain], r, sums + domain * chunks * of_chunk, chunks, line);
    });
  }

 private:
  struct Scratch {
    std::vector<C> queries, queries_t, rows, values, probabilities;
    std::vector<float> scores, transposed;
    Scratch(int64_t width, int64_t value_dim)
        : queries(kColumns * width), queries_t(kColumns * width), rows(kKeysOfChunk * std::max(width, value_dim)),
          values(kKeysOfChunk * value_dim),
          probabilities(kPairs == 2 ? kColumns * kKeysOfChunk : 0), scores(kKeysOfChunk * kColumns), transposed(kColumns * kKeysOfChunk) {}
  };

  struct Few {
    Buffer<float> scores;
    Buffer<C> queries;
  };

  // The keys of a chunk of one domain.
  struct Keys {
    const Domain* domain;
    int64_t count;
    int64_t places[kKeysOfChunk];  // indices among the keys of the domain
    int64_t rows[kKeysOfChunk];
    float x[kKeysOfChunk], y[kKeysOfChunk];  // coordinates
    float gates[kKeysOfChunk];  // in the units of scores, which are multiplied by the factor
    bool is_listed, has_gates, has_hidden, is_banded;
    bool is_hidden[kKeysOfChunk];
  };

  // Finds the chunk of the keys that a domain sees that begins with key number `first`.
  void find(const Domain& d, int64_t first, Keys& keys) const {
    keys.domain = &d;
    keys.count = 0;
    keys.is_listed = !p_.lists.empty();
    keys.has_gates = p_.has_gates();
    if (!keys.is_listed) {
      for (int64_t j = first; j < std::min(first + kKeysOfChunk, p_.num_keys); j++) keys.places[keys.count++] = j;
    } else {
      const List& list = p_.lists[d.first_list];
      int64_t unit = first / p_.unit, within = first % p_.unit;
      for (int64_t x = 0; x < kKeysOfChunk && unit < list.count; x++) {
        const int64_t place = list.units[unit] * p_.unit + within;
        if (place < p_.num_keys) {
          if (keys.has_gates) keys.gates[keys.count] = static_cast<float>(list.gates[unit] * of_gate_);
          keys.places[keys.count++] = place;
        }
        if (++within == p_.unit) within = 0, unit++;
      }
    }
    keys.has_hidden = keys.is_banded = false;
    for (int64_t x = 0; x < keys.count; x++) {
      keys.rows[x] = p_.key_row(d, keys.places[x]);
      keys.is_hidden[x] = masks_.hides(d, keys.rows[x]);
      if (terms_.coordinates != nullptr) {
        const float* of_row = terms_.of_key_row(d, keys.rows[x]);
        keys.x[x] = of_row[0], keys.y[x] = of_row[terms_.num_rows];
      }
      keys.has_hidden |= keys.is_hidden[x];
      const int64_t distance = keys.places[x] - position_;
      keys.is_banded |= positions_ - 1 + p_.low > distance || p_.high < distance;
    }
  }

  // For these keys: sums of values [rows, value_dim], then the largest score and the total of every row.
  void add(const Keys& k, float* sums, Scratch& s) const {
    const int64_t keys = rounded_up(k.count, 16), value_dim = p_.value_dim;
    if (keys == 0) {  // the list of this domain is shorter than others
      std::fill_n(sums + rows_ * sum_width_, kColumns, -kInfinity);
      return;
    }
    std::fill(s.queries.begin(), s.queries.end(), C(0));
    for (int64_t r = 0; r < rows_; r++) load(*k.domain, r, s.queries.data() + r * width_);
    pack_transposed(s.queries.data(), width_, s.queries_t.data(), kColumns, kColumns, width_);
    const Matrix of_keys = rows_of(key_, k, keys, p_.head_dim, width_, s);
    multiply(keys, kColumns, width_, of_keys.data, of_keys.ld, s.queries_t.data(), kColumns, s.scores.data(), kColumns, false);
    if (has_terms_) terms_.apply(s.scores.data(), keys * kColumns);
    for (int64_t r = 0; r < rows_ && has_terms_; r++) add_terms(k, r, s.scores.data() + r, kColumns);
    mask(k, keys, s.scores.data());
    exponentiate(keys, sums + rows_ * sum_width_, s);
    Matrix of_values = rows_of(value_, k, keys, value_dim, value_dim, s);
    if constexpr (kPairs == 2) {
      pack_rows(of_values.data, of_values.ld, s.values.data(), keys, value_dim);
      of_values = {s.values.data(), value_dim};
    }
    multiply(rows_, value_dim, keys, probabilities_of(s), kKeysOfChunk, of_values.data, of_values.ld, sums, sum_width_, false);
  }

  // Like `add`, with scores as [queries, keys], for several domains.
  template <int kRows>
  void add_few(const Keys* keys, int64_t num_domains, float* sums, int64_t of_domain, Few& few) const {
    // For up to two float32 rows, one key at a time is as fast as memory; else fewer instructions per key are faster.
    constexpr int kTogether = std::is_same_v<T, float> && kRows <= 2 ? 1 : 4;
    constexpr int64_t of_scores = kRows * kKeysOfChunk;
    const int64_t of_queries = kRows * query_width_, of_sums = kRows * sum_width_;
    float* scores = few.scores.at_least(num_domains * of_scores);
    C* queries = few.queries.at_least(num_domains * of_queries);
    std::fill_n(queries, num_domains * of_queries, C(0));
    std::fill_n(scores, num_domains * of_scores, -kInfinity);
    for (int64_t i = 0; i < num_domains; i++) {
      for (int64_t r = 0; r < kRows; r++) load(*keys[i].domain, r, queries + i * of_queries + r * query_width_);
      std::fill_n(sums + i * of_domain, of_sums, 0.0f);
    }
    // Sizes are captured by value, so that they stay in registers.
    const int64_t query_width = query_width_, sum_width = sum_width_;
    const int64_t head_dim = p_.head_dim, value_dim = p_.value_dim;
    for_each_rows<kTogether>(key_, head_dim, keys, num_domains, [=](int64_t i, int64_t x, const auto& rows) {
      constexpr int kKeys = std::tuple_size_v<std::decay_t<decltype(rows)>>;
      Floats dots[kRows][kKeys];
      for (auto& of_row : dots) std::fill_n(of_row, kKeys, Floats(0.0f));
      for (int64_t c = 0; c < head_dim; c += Numbers::size())
        for (int y = 0; y < kKeys; y++) {
          const Numbers part = part_of(rows[y], c, head_dim);
          for (int r = 0; r < kRows; r++) dots[r][y] = add_products(part, queries + i * of_queries + r * query_width + c, dots[r][y]);
        }
      for (int r = 0; r < kRows; r++) store_sums(dots[r], scores + i * of_scores + r * kKeysOfChunk + x);
    });
    for (int64_t i = 0; i < num_domains; i++)
      for (int64_t r = 0; r < kRows; r++)
        exponentiate_few(keys[i], r, scores + i * of_scores + r * kKeysOfChunk, sums + i * of_domain + of_sums + r);
    for_each_rows<kTogether>(value_, value_dim, keys, num_domains, [=](int64_t i, int64_t x, const auto& rows) {
      constexpr int kKeys = std::tuple_size_v<std::decay_t<decltype(rows)>>;
      Floats powers[kRows][kKeys];
      for (int r = 0; r < kRows; r++)
        for (int y = 0; y < kKeys; y++) powers[r][y] = Floats(scores[i * of_scores + r * kKeysOfChunk + x + y]);
      for (int64_t c = 0; c < value_dim; c += Numbers::size()) {
        Numbers parts[kKeys];
        for (int y = 0; y < kKeys; y++) parts[y] = part_of(rows[y], c, value_dim);
        for (int r = 0; r < kRows; r++) add_weighted(powers[r], parts, sums + i * of_domain + r * sum_width + c);
      }
    });
  }

  // Calls `body(domain, key, rows)` for the rows of a chunk that are not hidden, several keys at a time: for all
  // domains before the next keys, as heads are adjacent and memory is read fastest in its order.
  template <int kKeys, class Body>
  void for_each_rows(const Rows<const T>& from, int64_t dim, const Keys* keys, int64_t num_domains, Body body) const {
    constexpr int64_t of_line = 64 / static_cast<int64_t>(sizeof(T));
    const T* begin[kDomainsTogether];
    int64_t count = 0;
    for (int64_t i = 0; i < num_domains; i++) {
      begin[i] = from.at(keys[i].domain->batch, 0, keys[i].domain->head);
      count = std::max(count, keys[i].count);
    }
    const int64_t stride = from.row_stride();
    const int64_t ahead = kBytesAhead / (num_domains * dim * static_cast<int64_t>(sizeof(T))) + kKeys;
    for (int64_t x = 0; x < count; x += kKeys)
      for (int64_t i = 0; i < num_domains; i++) {
        const auto at = [&](int64_t y) { return begin[i] + keys[i].rows[y] * stride; };
        for (int64_t y = x + ahead; y < std::min(x + ahead + kKeys, keys[i].count); y++)
          for (int64_t c = 0; c < dim; c += of_line) __builtin_prefetch(at(y) + c, 0, 2);
        if (!keys[i].has_hidden && x + kKeys <= keys[i].count) {
          std::array<const T*, kKeys> rows;
          for (int y = 0; y < kKeys; y++) rows[y] = at(x + y);
          body(i, x, rows);
        } else {
          for (int64_t y = x; y < std::min(x + kKeys, keys[i].count); y++)
            if (!keys[i].is_hidden[y]) body(i, y, std::array{at(y)});
        }
      }
  }

  // The numbers of a row from index `c` on, zeros after the last.
  static Numbers part_of(const T* row, int64_t c, int64_t dim) {
    return c + Numbers::size() <= dim ? Numbers::loadu(row + c) : Numbers::loadu(row + c, dim - c);
  }

  // Scores of one query, whose keys' products are `of_key` apart, without masks.
  void add_terms(const Keys& k, int64_t r, float* scores, int64_t of_key) const {
    const int64_t head = k.domain->head * p_.ratio + r % p_.ratio, index = p_.query_index(p_.problems[0], r / p_.ratio);
    if (terms_.coordinates != nullptr) {
      float bias[kKeysOfChunk];
      terms_.of_coordinates(head, terms_.of_query_row(*k.domain, row_of(*k.domain, r)), k.x, k.y, rounded_up(k.count, kLanes), bias);
      for (int64_t x = 0; x < k.count; x++) scores[x * of_key] += bias[x] + terms_.of_key(*k.domain, k.rows[x]);
      return;
    }
    for (int64_t x = 0; x < k.count; x++)
      scores[x * of_key] += terms_.of_distance(head, k.places[x] - index) + terms_.of_key(*k.domain, k.rows[x]);
  }

  // Powers of two of a query's scores relative to the largest; `top`: the largest, and `kColumns` later the total.
  void exponentiate_few(const Keys& k, int64_t r, float* scores, float* top) const {
    constexpr bool is_coarse = !std::is_same_v<T, float>;
    const int64_t keys = rounded_up(k.count, kLanes), position = position_ + r / p_.ratio;
    if (has_terms_) {
      terms_.apply(scores, keys);
      add_terms(k, r, scores, 1);
      for (int64_t x = 0; x < keys; x++)
        if (x >= k.count || k.is_hidden[x]) scores[x] = -kInfinity;
    }
    for (int64_t x = 0; x < k.count && k.has_gates; x++) scores[x] += k.gates[x];
    for (int64_t x = 0; x < k.count && k.is_banded; x++)
      if (k.places[x] < position + p_.low || k.places[x] > position + p_.high) scores[x] = -kInfinity;
    Floats most(-kInfinity), total(0.0f);
    for (int64_t x = 0; x < keys; x += kLanes) most = at::vec::maximum(most, Floats::loadu(scores + x));
    top[0] = largest(most);
    const Floats safe(top[0] == -kInfinity ? 0.0f : top[0]), factor(factor_);
    for (int64_t x = 0; x < keys; x += kLanes) {
      const Floats power = exp2<is_coarse>((Floats::loadu(scores + x) - safe) * factor);
      power.store(scores + x);
      total = total + power;
    }
    top[kColumns] = sum_of(total);
  }

  struct Matrix {
    const C* data;
    int64_t ld;
  };

  // Rows of keys or values in place if they are evenly spaced, all seen and need no conversion; otherwise a copy.
  Matrix rows_of(const Rows<const T>& from, const Keys& k, int64_t keys, int64_t dim, int64_t width, Scratch& s) const {
    const Domain& d = *k.domain;
    if constexpr (std::is_same_v<T, C>)
      if (k.count == kKeysOfChunk && !k.is_listed && !k.has_hidden && width == dim)
        return {from.at(d.batch, k.rows[0], d.head), from.row_stride() * p_.key_step};
    C* to = s.rows.data();
    for (int64_t x = 0; x < keys; x++, to += width) {
      const bool is_read = x < k.count && !k.is_hidden[x];
      if (is_read) convert(from.at(d.batch, k.rows[x], d.head), to, dim);
      std::fill(is_read ? to + dim : to, to + width, C(0));
    }
    return {s.rows.data(), width};
  }

  template <class To>
  void load(const Domain& d, int64_t r, To* to) const {
    convert(query_.at(d.batch, row_of(d, r), d.head * p_.ratio + r % p_.ratio), to, p_.head_dim);
  }

  int64_t row_of(const Domain& d, int64_t r) const { return p_.query_row(d, p_.problems[0], r / p_.ratio); }

  static C* probabilities_of(Scratch& s) {
    if constexpr (kPairs == 2)
      return s.probabilities.data();
    else
      return s.transposed.data();
  }

  void mask(const Keys& k, int64_t keys, float* scores) const {
    for (int64_t x = 0; x < keys; x++, scores += kColumns) {
      if (x >= k.count || k.is_hidden[x]) {
        std::fill(scores, scores + kColumns, -kInfinity);
        continue;
      }
      for (int64_t r = 0; r < kColumns && k.has_gates; r++) scores[r] += k.gates[x];
      if (!k.is_banded) continue;
      // Clamped first: multiplied by the heads, the bounds would overflow.
      const int64_t distance = k.places[x] - position_;
      const int64_t low = std::clamp<int64_t>(distance - p_.high, 0, positions_) * p_.ratio;
      const int64_t high = std::max(low, std::clamp<int64_t>(distance - p_.low + 1, 0, positions_) * p_.ratio);
      std::fill(scores, scores + low, -kInfinity);
      std::fill(scores + high, scores + kColumns, -kInfinity);
    }
  }

  // Powers of two of every query's scores less its largest, as rows; `tops`: the largest scores, then the totals.
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
    const int64_t value_dim = p_.value_dim, of_chunk = rows_ * sum_width_ + 2 * kColumns;
    float top = -kInfinity, total = 0.0f;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const float of_top = sums[chunk * of_chunk + rows_ * sum_width_ + r];
      if (!(of_top <= top)) top = of_top;  // NaN counts as the largest
      if (std::isnan(top)) break;
    }
    if (top == -kInfinity) return;  // the query sees none of these keys
    std::fill(line.begin(), line.end(), 0.0f);
    for (int64_t chunk = 0; chunk < chunks; chunk++, sums += of_chunk) {
      const float of_top = sums[rows_ * sum_width_ + r], weight = of_top == top ? 1.0f : exp2f((of_top - top) * factor_);
      if (weight == 0.0f) continue;
      total += weight * sums[rows_ * sum_width_ + kColumns + r];
      for (int64_t c = 0; c < value_dim; c++) line[c] += weight * sums[r * sum_width_ + c];
    }
    results_.merge(d.batch, row_of(d, r), d.head * p_.ratio + r % p_.ratio, line.data(), top * (factor_ * kLn2), total);
  }

  const Partial& p_;
  const Masks& masks_;
  const Terms& terms_;
  const bool has_terms_;
  const Rows<const T> query_, key_, value_;
  const Results<T> results_;
  const float factor_;
  const double of_gate_;
  const int64_t width_, query_width_, sum_width_, position_, positions_, rows_;
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
