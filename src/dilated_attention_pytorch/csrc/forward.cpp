#include "kernels.h"
#include "packing.h"
#include "results.h"

#include <numeric>

namespace dilated_attention {
namespace {

constexpr int64_t kRowsOfStrip = 64;  // rows of a tile at the edge of a band, where each strip has its own keys
constexpr float kRoundedScore = 1024.0f;

// One online softmax over the keys that a tile of queries sees; its result is merged with those of other partials.
template <class T>
class Forward {
  using C = Factor<T>;
  static constexpr int64_t kPairs = kPair<C>;
  // With more rows, packed keys are read less often; the scores of a block still fit into a processor's L2 cache.
  static constexpr int64_t kRowsOfTile = kPairs == 2 ? 128 : 256;

 public:
  Forward(const Partial& partial, const Masks& masks, const ForwardOperands& x)
      : p_(partial), masks_(masks), terms_(x.terms), has_terms_(x.terms.are_present()), query_(x.query),
        key_(x.key, x.of_keys.row, x.of_keys.head), value_(x.value, x.of_keys.row, x.of_keys.head),
        results_(x, partial, masks),
        factor_(x.terms.factor()), width_(rounded_up(partial.head_dim, kPairs)),
        keys_of_block_(std::clamp(rounded_up(partial.num_keys, kAlignment), kAlignment, kPackedKeys)),
        positions_(std::min(std::max<int64_t>(1, kRowsOfTile / partial.ratio), longest_problem(partial))),
        tiles_(tiles_of(partial, positions_)), strip_(positions_of_strip(partial.ratio)) {}

  void run() {
    const int64_t num_domains = p_.domains.size(), num_tiles = tiles_.size();
    // One window of keys is packed at a time, for as many domains as fit.
    const int64_t window = p_.lists.empty() ? kKeysOfWindow : p_.num_keys;
    const int64_t blocks_of_domain = (std::min(p_.num_keys, window) + keys_of_block_ - 1) / keys_of_block_;
    const int64_t of_block = keys_of_block_ * (width_ + p_.value_dim), bytes = blocks_of_domain * of_block * sizeof(C);
    const int64_t together = std::clamp<int64_t>(kPackedBytes / bytes, 1, num_domains);
    const double operations = 2.0 * (p_.head_dim + p_.value_dim) * p_.pairs() / (num_domains * p_.num_keys);  // of a key of a domain
    std::vector<Block> packed(together * blocks_of_domain);
    Buffer<C> memory;
    for (int64_t begin = 0; begin < p_.num_keys; begin += window) {
      const int64_t end = std::min(begin + window, p_.num_keys), blocks = (end - begin + keys_of_block_ - 1) / keys_of_block_;
      for (int64_t start = 0; start < num_domains; start += together) {
        const int64_t some = std::min(together, num_domains - start);
        const std::vector<int64_t> places = seen_blocks(start, some, blocks, blocks_of_domain);
        for (Block& block : packed) block.is_hidden = true;
        C* factors = memory.at_least(places.size() * of_block);
        const int64_t threads_of_packing = threads_for(0.0, 2.0 * places.size() * of_block * sizeof(C));
        for_each_piece(places.size(), threads_of_packing, [&](const auto& next) {
          std::vector<C> rows(keys_of_block_ * std::max(width_, p_.value_dim));
          for (int64_t piece; (piece = next()) >= 0;) {
            Block& block = packed[places[piece]];
            block.factors = factors + piece * of_block;
            const int64_t domain = start + places[piece] / blocks_of_domain, first = places[piece] % blocks_of_domain;
            pack(p_.domains[domain], begin + first * keys_of_block_, end, rows.data(), block);
          }
        });
        for_each_piece(some * num_tiles, threads_for(operations * some * (end - begin), 0.0), [&](const auto& next) {
          const WithoutSubnormals normal(terms_);
          Scratch scratch(*this);
          for (int64_t piece; (piece = next()) >= 0;) {
            // From the end: the tiles of a causal partial that see most keys come first.
            const Tile& tile = tiles_[num_tiles - 1 - piece / some];
            const int64_t domain = piece % some;
            attend(p_.domains[start + domain], tile, packed.data() + domain * blocks_of_domain, begin, end, scratch);
          }
          at::native::cpublas::brgemm_release(kPairs == 2);
        });
      }
    }
  }

 private:
  // Keys as the right operands of both products: [width, keys] and [keys, value_dim].
  struct Block {
    C* factors;
    std::vector<float> bias;         // of the keys, -inf for hidden ones; empty if there is none
    std::vector<float> coordinates;  // x, then y of the keys
    std::vector<uint32_t> counters;  // of dropout
    bool is_hidden;                  // whether all keys are hidden
  };

  struct Scratch {
    std::vector<C> queries, probabilities;
    std::vector<float> scores, sums, top, totals;
    std::vector<uint32_t> counters;

    explicit Scratch(const Forward& f) {
      const int64_t rows = rounded_up(f.positions_ * f.p_.ratio, 16);
      queries.resize(rows * f.width_);
      probabilities.resize(kPairs == 2 ? rows * f.keys_of_block_ : 0);
      scores.resize(rows * f.keys_of_block_);
      sums.resize(rows * f.p_.value_dim);
      top.resize(rows);
      totals.resize(rows * kLanes);
      counters.resize(rows);
    }

    // Probabilities from index `place` on, in rows as long as those of the scores.
    C* probabilities_at(int64_t place) {
      if constexpr (kPairs == 2)
        return probabilities.data() + place;
      else
        return scores.data() + place;
    }
  };

  // Indices of the blocks to pack for some domains, `blocks_of_domain` per domain: all blocks, or those of any list.
  std::vector<int64_t> seen_blocks(int64_t start, int64_t some, int64_t blocks, int64_t blocks_of_domain) const {
    std::vector<int64_t> places;
    for (int64_t domain = 0; domain < some; domain++) {
      std::vector<bool> is_seen(blocks, p_.lists.empty());
      for (size_t problem = 0; problem < p_.problems.size() && !p_.lists.empty(); problem++) {
        const List& list = p_.lists[p_.domains[start + domain].first_list + problem];
        for (int64_t i = 0; i < list.count; i++) {
          const int64_t first = list.units[i] * p_.unit, stop = std::min(first + p_.unit, p_.num_keys);
          for (int64_t block = first / keys_of_block_; block * keys_of_block_ < stop; block++) is_seen[block] = true;
        }
      }
      for (int64_t block = 0; block < blocks; block++)
        if (is_seen[block]) places.push_back(domain * blocks_of_domain + block);
    }
    return places;
  }

  void pack(const Domain& d, int64_t first, int64_t stop, C* rows, Block& block) const {
    const int64_t count = std::min(keys_of_block_, stop - first), value_dim = p_.value_dim;
    int64_t num_hidden = 0;
    block.bias.clear();
    if (terms_.key_bias) block.bias.resize(keys_of_block_);
    for (int64_t x = 0; x < count; x++) {
      const int64_t row = p_.key_row(d, first + x);
      if (terms_.key_bias) block.bias[x] = terms_.of_key(d, row);
      if (masks_.hides(d, row)) {
        block.bias.resize(keys_of_block_);
        block.bias[x] = -kInfinity;
        num_hidden++;
      }
    }
    block.is_hidden = num_hidden == count;
    if (block.is_hidden) return;
    const auto copy = [&](const Rows<const T>& from, int64_t dim, int64_t width) {
      for (int64_t x = 0; x < keys_of_block_; x++) {
        C* to = rows + x * width;
        const bool is_read = x < count && (num_hidden == 0 || block.bias[x] != -kInfinity);
        if (is_read) convert(from.at(d.batch, p_.key_row(d, first + x), d.head), to, dim);
        std::fill(is_read ? to + dim : to, to + width, C(0));
      }
    };
    copy(key_, p_.head_dim, width_);
    pack_transposed(rows, width_, block.factors, keys_of_block_, keys_of_block_, width_);
    copy(value_, value_dim, value_dim);
    pack_rows(rows, value_dim, block.factors + width_ * keys_of_block_, keys_of_block_, value_dim);
    if (terms_.coordinates != nullptr) {
      block.coordinates.assign(2 * keys_of_block_, 0.0f);
      for (int64_t x = 0; x < count; x++) {
        const float* of_row = terms_.of_key_row(d, p_.key_row(d, first + x));
        block.coordinates[x] = of_row[0], block.coordinates[keys_of_block_ + x] = of_row[terms_.num_rows];
      }
    }
    if (!masks_.is_dropped) return;
    block.counters.assign(keys_of_block_, 0);
    for (int64_t x = 0; x < count; x++) block.counters[x] = masks_.of_key(p_.key_row(d, first + x));
  }

  void attend(const Domain& d, const Tile& tile, const Block* packed, int64_t begin, int64_t end, Scratch& s) const {
    bool is_begun = false;
    const Problem& problem = p_.problems[tile.problem];
    const int64_t position = p_.position(tile), last = position + tile.stop - tile.first - 1;
    for (int64_t at = 0; at * keys_of_block_ < end - begin; at++) {
      const int64_t first = begin + at * keys_of_block_, stop = std::min(first + keys_of_block_, end);
      if (packed[at].is_hidden) continue;
      const bool is_edge = last + p_.low > first || position + p_.high < stop - 1;
      const int64_t step = is_edge ? strip_ : tile.stop - tile.first;
      for (int64_t i = tile.first; i < tile.stop; i += step) {
        const Tile strip{tile.problem, i, std::min(i + step, tile.stop)};
        p_.for_each_run(d, strip, first, stop, [&](const Run& run) {
          if (!is_begun) load(d, problem, tile, s);
          is_begun = true;
          add(d, strip, (i - tile.first) * p_.ratio, packed[at], first, run, s);
        });
      }
    }
    if (!is_begun) return;
    for (int64_t i = tile.first, r = 0; i < tile.stop; i++)
      for (int64_t g = 0; g < p_.ratio; g++, r++) {
        const float total = sum_of(Floats::loadu(s.totals.data() + r * kLanes));
        if (total == 0.0f) continue;  // the query sees none of these keys
        results_.merge(
            d.batch, p_.query_row(d, problem, i), d.head * p_.ratio + g, s.sums.data() + r * p_.value_dim,
            s.top[r] * (factor_ * kLn2), total);
      }
  }

  // The rows of a strip are a multiple of the number to which those of a product are rounded up.
  static int64_t positions_of_strip(int64_t ratio) {
    const int64_t unit = 16 / std::gcd(int64_t{16}, ratio);
    return std::max<int64_t>(1, kRowsOfStrip / ratio / unit) * unit;
  }

  int64_t rows_of(const Tile& tile) const { return (tile.stop - tile.first) * p_.ratio; }
  // Few distinct heights, as each has its own kernel.
  int64_t height_of(const Tile& tile) const { return rows_of(tile) > 8 ? rounded_up(rows_of(tile), 16) : rows_of(tile); }

  void load(const Domain& d, const Problem& problem, const Tile& tile, Scratch& s) const {
    const int64_t rows = rows_of(tile);
    for (int64_t i = tile.first, r = 0; i < tile.stop; i++)
      for (int64_t g = 0; g < p_.ratio; g++, r++) {
        const int64_t row = p_.query_row(d, problem, i), head = d.head * p_.ratio + g;
        C* to = s.queries.data() + r * width_;
        convert(query_.at(d.batch, row, head), to, p_.head_dim);
        std::fill(to + p_.head_dim, to + width_, C(0));
        if (masks_.is_dropped) s.counters[r] = masks_.of_query(d.batch, head, row);
      }
    std::fill(s.queries.begin() + rows * width_, s.queries.begin() + height_of(tile) * width_, C(0));
    std::fill_n(s.sums.begin(), height_of(tile) * p_.value_dim, 0.0f);
    std::fill_n(s.top.begin(), rows, -kInfinity);
    std::fill_n(s.totals.begin(), rows * kLanes, 0.0f);
  }

  // Adds a run of a block, which begins with key `first`, to a strip: the tile's rows from `first_row` on.
  void add(
      const Domain& d, const Tile& tile, int64_t first_row, const Block& block, int64_t first, const Run& of_keys, Scratch& s) const {
    const int64_t rows = rows_of(tile), height = height_of(tile), value_dim = p_.value_dim;
    const int64_t run = of_keys.begin - first, run_end = of_keys.end - first;
    const int64_t position = p_.position(tile), last = position + tile.stop - tile.first - 1;
    const int64_t begin = run / kAlignment * kAlignment, count = rounded_up(run_end - begin, kAlignment);
    const C *keys = block.factors, *values = keys + keys_of_block_ * width_;
    float *scores = s.scores.data() + first_row * keys_of_block_, *sums = s.sums.data() + first_row * value_dim;
    multiply(height, count, width_, s.queries.data() + first_row * width_, width_, keys + begin * kPairs, keys_of_block_, scores, keys_of_block_, false);
    const bool is_banded = last + p_.low > first + run || position + p_.high < first + run_end - 1;
    const bool is_masked = is_banded || begin < run || run_end < begin + count;
    // In the units of the scores, which are multiplied by the factor.
    const float gate = of_keys.gate == 0.0f ? 0.0f : static_cast<float>(of_keys.gate * (double{kLog2E} / factor_));
    float copy[kPackedKeys];
    for (int64_t r = 0; r < rows; r++) {
      float* row = scores + r * keys_of_block_;
      if (has_terms_) terms_.apply(row, count, distances_of(d, tile, r, block, first, begin, count, copy));
      if (!block.bias.empty())
        for (int64_t x = 0; x < count; x++) row[x] += block.bias[begin + x];
      if (is_masked) {
        const int64_t i = position + r / p_.ratio - first;
        const int64_t low = is_banded ? std::clamp(i + p_.low, run, run_end) : run;
        const int64_t high = is_banded ? std::clamp(i + p_.high + 1, low, run_end) : run_end;
        std::fill(row, row + low - begin, -kInfinity);
        std::fill(row + high - begin, row + count, -kInfinity);
      }
      C* probabilities = s.probabilities_at((first_row + r) * keys_of_block_);
      const float decay = exponentiate(row, probabilities, count, gate, s.top[first_row + r], s.totals.data() + (first_row + r) * kLanes);
      if (masks_.is_dropped) drop(s.counters[first_row + r], block.counters.data() + begin, probabilities, count);
      if (decay != 1.0f)
        for (int64_t c = 0; c < value_dim; c++) sums[r * value_dim + c] *= decay;
    }
    multiply(
        height, value_dim, count, s.probabilities_at(first_row * keys_of_block_), keys_of_block_, values + begin * value_dim, value_dim,
        sums, value_dim, true);
  }

  // Biases by distance of row `r` and `count` keys from the block's key `begin` on; null without any.
  const float* distances_of(
      const Domain& d, const Tile& tile, int64_t r, const Block& block, int64_t first, int64_t begin, int64_t count, float* copy) const {
    const Problem& problem = p_.problems[tile.problem];
    const int64_t head = d.head * p_.ratio + r % p_.ratio, i = tile.first + r / p_.ratio;
    if (terms_.coordinates == nullptr) return terms_.of_distances(head, first + begin - p_.query_index(problem, i), count, copy);
    const float *x = block.coordinates.data() + begin, *y = x + keys_of_block_;
    terms_.of_coordinates(head, terms_.of_query_row(d, p_.query_row(d, problem, i)), x, y, count, copy);
    return copy;
  }

  void drop(uint32_t query, const uint32_t* keys, C* probabilities, int64_t count) const {
    for (int64_t x = 0; x < count; x++) probabilities[x] = masks_.keeps(query, keys[x]) ? probabilities[x] : C(0);
  }

  // Powers of two of a row's scores with their gate, less the largest so far; returns the factor of earlier sums.
  float exponentiate(float* row, C* probabilities, int64_t count, float gate, float& top, float* totals) const {
    constexpr bool is_coarse = !std::is_same_v<T, float>;
    Floats most(-kInfinity), more(-kInfinity);
    int64_t x = 0;
    for (; x + 2 * kLanes <= count; x += 2 * kLanes) {
      most = at::vec::maximum(most, Floats::loadu(row + x));
      more = at::vec::maximum(more, Floats::loadu(row + x + kLanes));
    }
    if (x < count) most = at::vec::maximum(most, Floats::loadu(row + x));
    const float before = top;
    top = std::max(before, largest(at::vec::maximum(most, more)) + gate);
    const float safe = top == -kInfinity ? 0.0f : top;
    const float decay = before == top ? 1.0f : exp2f((before - safe) * factor_);
    if (std::abs(safe * factor_) > kRoundedScore) {
      // The rounding error of so large a product would show in the powers.
      for (x = 0; x < count; x += kLanes) (Floats::loadu(row + x) - Floats(safe - gate)).store(row + x);
    }
    const Floats factor(factor_), minus(std::abs(safe * factor_) > kRoundedScore ? 0.0f : (gate - safe) * factor_);
    Floats sum(0.0f), other(0.0f);
    for (x = 0; x + 2 * kLanes <= count; x += 2 * kLanes) {
      const Floats low = exp2<is_coarse>(at::vec::fmadd(Floats::loadu(row + x), factor, minus));
      const Floats high = exp2<is_coarse>(at::vec::fmadd(Floats::loadu(row + x + kLanes), factor, minus));
      sum = sum + low;
      other = other + high;
      store_pair(probabilities + x, low, high);
    }
    if (x < count) {
      const Floats low = exp2<is_coarse>(at::vec::fmadd(Floats::loadu(row + x), factor, minus));
      sum = sum + low;
      store_one(probabilities + x, low);
    }
    at::vec::fmadd(Floats::loadu(totals), Floats(decay), sum + other).store(totals);
    return decay;
  }

  const Partial& p_;
  const Masks& masks_;
  const Terms& terms_;
  const bool has_terms_;
  const Rows<const T> query_, key_, value_;
  const Results<T> results_;
  const float factor_;
  const int64_t width_, keys_of_block_, positions_;  // positions per tile
  const std::vector<Tile> tiles_;
  const int64_t strip_;  // positions per strip
};

}  // namespace

void forward(const Partial& partial, const Masks& masks, const ForwardOperands& operands) {
  if (partial.problems.size() == 1 && !masks.is_dropped && partial.problems[0].count * partial.ratio <= kRowsOfStream)
    return stream(partial, masks, operands);
  switch (operands.query.scalar_type()) {
    case at::kFloat: return Forward<float>(partial, masks, operands).run();
    case at::kBFloat16: return Forward<BFloat16>(partial, masks, operands).run();
    default: return Forward<Half>(partial, masks, operands).run();
  }
}

}  // namespace dilated_attention
