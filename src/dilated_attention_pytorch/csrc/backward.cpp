#include "kernels.h"
#include "packing.h"

namespace dilated_attention {
namespace {

constexpr int64_t kRowsOfTile = 64;
constexpr int64_t kKeysOfBlock = 128;
constexpr int64_t kKeysOfSplit = 1024;  // fewer keys are not worth a separate thread

// Gradients of one partial under the merged output O and log-sum-exp L: with P = exp(s - L) and
// dS = P (dP - rowsum(dO O) + dL), dV = P' dO, dK = dS' Q and dQ = dS K. Scores are computed transposed, [keys, queries]:
// L and the number subtracted from dP are then per column, and P and dS are left operands without a transpose.
template <class T>
class Backward {
  using C = Factor<T>;
  static constexpr int64_t kPairs = kPair<C>;

 public:
  Backward(const Partial& partial, const Masks& masks, const BackwardOperands& x)
      : p_(partial), masks_(masks), query_(x.query), key_(x.key, x.of_keys.row, x.of_keys.head),
        value_(x.value, x.of_keys.row, x.of_keys.head), out_(x.out), grad_out_(x.grad_out),
        lse_(x.lse), grad_lse_(x.grad_lse ? *x.grad_lse : x.lse), has_grad_lse_(x.grad_lse.has_value()),
        grad_query_(x.grad_query, x.of_grad_query.row, x.of_grad_query.head * partial.ratio),
        grad_key_(x.grad_key, x.of_grad_keys.row, x.of_grad_keys.head),
        grad_value_(x.grad_value, x.of_grad_keys.row, x.of_grad_keys.head), scale_(static_cast<float>(x.scale)),
        width_(rounded_up(partial.head_dim, kPairs)),
        keys_of_block_(std::clamp(rounded_up(partial.num_keys, kAlignment), kAlignment, kKeysOfBlock)),
        positions_(std::min(positions_of_tile(partial), longest_problem(partial))),
        rows_(rounded_up(positions_ * partial.ratio, kAlignment)), tiles_(tiles_of(partial, positions_)),
        operations_(10.0 * partial.head_dim * partial.pairs()), threads_(threads_for(operations_, 0.0)),
        splits_(splits_of(partial, threads_)), most_tiles_(std::clamp<int64_t>(
            kRowsOfChunk * (splits_ > 1 ? 4 * threads_ / splits_ : 1) /
                rounded_up(positions_of_tile(partial) * partial.ratio, kAlignment),
            1, tiles_.size())) {}

  void run() {
    if (splits_ == 1)
      run_domains();
    else
      for (const Domain& domain : p_.domains) run_shares(domain);
  }

 private:
  // Tiles of a chunk: queries and output gradients as right operands, transposed and not; L, delta and counters.
  struct Tiles {
    Buffer<C> factors;
    C *queries_t, *grads_t, *queries, *grads;
    std::vector<float> lse, delta;
    std::vector<uint32_t> counters;

    explicit Tiles(const Backward& b) : lse(b.most_tiles_ * b.rows_), delta(lse.size()), counters(b.masks_.is_dropped ? lse.size() : 0) {
      const int64_t size = b.most_tiles_ * b.rows_ * b.width_;
      queries_t = factors.at_least(4 * size), grads_t = queries_t + size, queries = grads_t + size, grads = queries + size;
    }
  };

  struct Scratch {
    // A block of keys as left operands, and its gradients.
    std::vector<C> keys, values, keys_t;
    std::vector<float> grad_keys, grad_values;
    std::vector<uint32_t> key_counters;
    std::vector<uint8_t> is_hidden;
    bool has_hidden;
    // Per block and tile.
    std::vector<float> scores, grad_scores, kept;
    std::vector<C> probabilities, rounded, paired;

    explicit Scratch(const Backward& b) {
      for (auto* x : {&keys, &values, &keys_t}) x->resize(b.keys_of_block_ * b.width_);
      for (auto* x : {&grad_keys, &grad_values}) x->resize(b.keys_of_block_ * b.p_.head_dim);
      is_hidden.resize(b.keys_of_block_);
      for (auto* x : {&scores, &grad_scores}) x->resize(b.keys_of_block_ * b.rows_);
      if (kPairs == 2)
        for (auto* x : {&probabilities, &rounded, &paired}) x->resize(b.keys_of_block_ * b.rows_);
      if (!b.masks_.is_dropped) return;
      key_counters.resize(b.keys_of_block_);
      kept.resize(2 * b.keys_of_block_ * b.rows_);
    }
  };

  // Number of shares into which the keys of a domain are split; 1 if there are enough domains for the threads.
  static int64_t splits_of(const Partial& partial, int64_t threads) {
    if (threads == 1 || static_cast<int64_t>(partial.domains.size()) >= 4 * threads) return 1;
    return std::clamp<int64_t>(partial.num_keys / kKeysOfSplit, 1, 2 * threads);
  }

  // One piece of work per domain.
  void run_domains() const {
    const int64_t num_tiles = tiles_.size(), of_tile = rows_ * p_.head_dim;
    for_each_piece(p_.domains.size(), threads_, [&](const auto& next) {
      Scratch scratch(*this);
      Tiles packed(*this);
      Buffer<C> rows;
      Buffer<float> memory;
      float *grads = memory.at_least((most_tiles_ + 1) * of_tile), *lines = grads + most_tiles_ * of_tile;
      std::vector<uint8_t> has_grads(most_tiles_);
      for (int64_t piece; (piece = next()) >= 0;)
        for (int64_t first = 0; first < num_tiles; first += most_tiles_) {
          const Domain& domain = p_.domains[piece];
          const int64_t tiles = std::min(most_tiles_, num_tiles - first);
          for (int64_t tile = 0; tile < tiles; tile++) pack_tile(domain, tiles_[first + tile], tile, packed, rows);
          add(domain, 0, p_.num_keys, first, tiles, packed, grads, has_grads.data(), scratch);
          for (int64_t tile = 0; tile < tiles; tile++)
            if (has_grads[tile]) add_to_queries(domain, tiles_[first + tile], grads + tile * of_tile, lines);
        }
      at::native::cpublas::brgemm_release(kPairs == 2);
    });
  }

  // For few domains: the keys of one are split into shares, and every share has its own gradient of the queries.
  void run_shares(const Domain& domain) const {
    const int64_t num_tiles = tiles_.size(), of_tile = rows_ * p_.head_dim;
    // A unit with a gate belongs to one share, which adds up its gradient.
    const int64_t whole = p_.has_gates() ? rounded_up(keys_of_block_, p_.unit) : keys_of_block_;
    const int64_t keys_of_share = rounded_up((p_.num_keys + splits_ - 1) / splits_, whole);
    Tiles packed(*this);
    Buffer<float> memory;
    float* shares = memory.at_least(splits_ * most_tiles_ * of_tile);
    std::vector<uint8_t> has_grads(splits_ * most_tiles_);
    const double of_domain = operations_ / p_.domains.size(), bytes = 2.0 * most_tiles_ * of_tile * sizeof(float);
    for (int64_t first = 0; first < num_tiles; first += most_tiles_) {
      const int64_t tiles = std::min(most_tiles_, num_tiles - first);
      for_each_piece(tiles, threads_for(0.0, bytes), [&](const auto& next) {
        Buffer<C> rows;
        for (int64_t tile; (tile = next()) >= 0;) pack_tile(domain, tiles_[first + tile], tile, packed, rows);
      });
      for_each_piece(splits_, threads_for(of_domain * tiles / num_tiles, 0.0), [&](const auto& next) {
        Scratch scratch(*this);
        for (int64_t share; (share = next()) >= 0;) {
          const int64_t begin = share * keys_of_share, end = std::min(begin + keys_of_share, p_.num_keys);
          add(domain, begin, end, first, tiles, packed, shares + share * tiles * of_tile, has_grads.data() + share * tiles, scratch);
        }
        at::native::cpublas::brgemm_release(kPairs == 2);
      });
      for_each_piece(tiles, threads_for(0.0, splits_ * bytes), [&](const auto& next) {
        Buffer<float> lines;
        for (int64_t tile; (tile = next()) >= 0;)
          for (int64_t share = 0, at = tile; share < splits_; share++, at += tiles)
            if (has_grads[at]) add_to_queries(domain, tiles_[first + tile], shares + at * of_tile, lines.at_least(of_tile));
      });
    }
  }

  static int64_t positions_of_tile(const Partial& partial) { return std::max<int64_t>(1, kRowsOfTile / partial.ratio); }

  void pack_tile(const Domain& d, const Tile& tile, int64_t place, Tiles& packed, Buffer<C>& memory) const {
    const Problem& problem = p_.problems[tile.problem];
    const int64_t rows = (tile.stop - tile.first) * p_.ratio, at = place * rows_ * width_, head_dim = p_.head_dim;
    const auto copy = [&](const Rows<const T>& from, C* transposed, C* paired) {
      C* lines = kPairs == 1 ? paired : memory.at_least(rows_ * width_);
      C* to = lines;
      for (int64_t i = tile.first; i < tile.stop; i++)
        for (int64_t g = 0; g < p_.ratio; g++, to += width_) {
          convert(from.at(d.batch, p_.query_row(d, problem, i), d.head * p_.ratio + g), to, head_dim);
          if (head_dim < width_) to[head_dim] = C(0);
        }
      std::fill(to, lines + rows_ * width_, C(0));
      pack_transposed(lines, width_, transposed, rows_, rows_, width_);
      if constexpr (kPairs == 2) pack_rows(lines, width_, paired, rows_, width_);
    };
    copy(query_, packed.queries_t + at, packed.queries + at);
    copy(grad_out_, packed.grads_t + at, packed.grads + at);
    float *lse = packed.lse.data() + place * rows_, *delta = packed.delta.data() + place * rows_;
    std::fill(lse + rows, lse + rows_, kInfinity);
    std::fill(delta + rows, delta + rows_, 0.0f);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t row = p_.query_row(d, problem, tile.first + r / p_.ratio), head = d.head * p_.ratio + r % p_.ratio;
      const float of_row = *lse_.at(d.batch, row, head);
      if (masks_.is_dropped) packed.counters[place * rows_ + r] = masks_.of_query(d.batch, head, row);
      // The probabilities of a row without a key are 0.
      lse[r] = of_row == -kInfinity ? kInfinity : of_row * kLog2E;
      delta[r] = of_row == -kInfinity ? 0.0f
                                      : dot(out_.at(d.batch, row, head), grad_out_.at(d.batch, row, head), head_dim) -
                                            (has_grad_lse_ ? *grad_lse_.at(d.batch, row, head) : 0.0f);
    }
  }

  // Returns whether any of the keys is visible.
  bool pack_block(const Domain& d, int64_t first, int64_t count, Scratch& s) const {
    int64_t num_hidden = 0;
    for (int64_t x = 0; x < keys_of_block_; x++) {
      const int64_t row = p_.key_row(d, first + x);
      s.is_hidden[x] = x >= count || masks_.hides(d, row);
      num_hidden += s.is_hidden[x];
      if (masks_.is_dropped) s.key_counters[x] = masks_.of_key(row);
    }
    if (num_hidden == keys_of_block_) return false;
    s.has_hidden = num_hidden > keys_of_block_ - count;
    const auto copy = [&](const Rows<const T>& from, C* to) {
      for (int64_t x = 0; x < keys_of_block_; x++, to += width_) {
        if (!s.is_hidden[x]) convert(from.at(d.batch, p_.key_row(d, first + x), d.head), to, p_.head_dim);
        if (s.is_hidden[x]) std::fill(to, to + width_, C(0));
        if (p_.head_dim < width_) to[p_.head_dim] = C(0);
      }
    };
    copy(key_, s.keys.data());
    copy(value_, s.values.data());
    transpose(s.keys.data(), width_, s.keys_t.data(), keys_of_block_, keys_of_block_, p_.head_dim);
    std::fill(s.grad_keys.begin(), s.grad_keys.end(), 0.0f);
    std::fill(s.grad_values.begin(), s.grad_values.end(), 0.0f);
    return true;
  }

  // Adds the contributions of the keys [begin, end) and the tiles from `first_tile` on. `grads` are set to the tiles'
  // query gradients, transposed, where `has_grads` is set.
  void add(
      const Domain& d, int64_t begin, int64_t end, int64_t first_tile, int64_t tiles, const Tiles& packed, float* grads,
      uint8_t* has_grads, Scratch& s) const {
    std::fill_n(has_grads, tiles, 0);
    for (int64_t first = begin; first < end; first += keys_of_block_) {
      const int64_t stop = std::min(first + keys_of_block_, end);
      bool is_packed = false, is_seen = true;
      for (int64_t place = 0; place < tiles && is_seen; place++) {
        const Tile& tile = tiles_[first_tile + place];
        p_.for_each_run(d, tile, first, stop, [&](const Run& run) {
          if (!is_packed) is_seen = pack_block(d, first, stop - first, s);
          is_packed = true;
          if (!is_seen) return;
          add_tile(tile, first, run, place, packed, grads, has_grads[place], s);
          has_grads[place] = true;
        });
      }
      if (is_packed && is_seen) add_to_keys(d, first, stop - first, s);
    }
  }

  void add_tile(
      const Tile& tile, int64_t first, const Run& of_keys, int64_t place, const Tiles& packed, float* grads, bool is_added,
      Scratch& s) const {
    const int64_t run = of_keys.begin - first, run_end = of_keys.end - first;
    const int64_t begin = run / kAlignment * kAlignment, keys = rounded_up(run_end - begin, kAlignment);
    const int64_t at = place * rows_ * width_, head_dim = p_.head_dim;
    multiply(keys, rows_, width_, s.keys.data() + begin * width_, width_, packed.queries_t + at, rows_, s.scores.data(), rows_, false);
    multiply(keys, rows_, width_, s.values.data() + begin * width_, width_, packed.grads_t + at, rows_, s.grad_scores.data(), rows_, false);
    mask(tile, first, begin, keys, run, run_end, s);
    if (masks_.is_dropped) draw(begin, keys, packed.counters.data() + place * rows_, s);
    const float *lse = packed.lse.data() + place * rows_, *delta = packed.delta.data() + place * rows_;
    if (of_keys.grad_gate != nullptr)
      *of_keys.grad_gate += differentiate<true>(keys, lse, delta, of_keys.gate, s);
    else
      differentiate<false>(keys, lse, delta, 0.0f, s);
    const C *probabilities, *rounded, *paired;
    if constexpr (kPairs == 2) {
      probabilities = s.probabilities.data(), rounded = s.rounded.data(), paired = s.paired.data();
    } else {
      probabilities = masks_.is_dropped ? s.kept.data() : s.scores.data(), rounded = paired = s.grad_scores.data();
    }
    multiply(keys, head_dim, rows_, probabilities, rows_, packed.grads + at, width_, s.grad_values.data() + begin * head_dim, head_dim, true);
    multiply(keys, head_dim, rows_, rounded, rows_, packed.queries + at, width_, s.grad_keys.data() + begin * head_dim, head_dim, true);
    multiply(head_dim, rows_, keys, s.keys_t.data() + begin, keys_of_block_, paired, rows_, grads + place * rows_ * head_dim, rows_, is_added);
  }

  // Sets the scores of pairs that do not see each other to -inf. Columns are queries, `ratio` heads of each.
  void mask(const Tile& tile, int64_t first, int64_t begin, int64_t keys, int64_t run, int64_t run_end, Scratch& s) const {
    const int64_t position = p_.position(tile), last = position + tile.stop - tile.first - 1;
    const bool is_banded = last + p_.low > first + run || position + p_.high < first + run_end - 1;
    if (!is_banded && !s.has_hidden && begin == run && begin + keys == run_end) return;
    for (int64_t x = begin; x < begin + keys; x++) {
      float* row = s.scores.data() + (x - begin) * rows_;
      if (x < run || x >= run_end || s.is_hidden[x]) {
        std::fill(row, row + rows_, -kInfinity);
      } else if (is_banded) {
        // Clamped first: multiplied by the heads, the bounds would overflow.
        const int64_t low = std::clamp<int64_t>(first + x - p_.high - position, 0, positions_) * p_.ratio;
        const int64_t high = std::max(low, std::clamp<int64_t>(first + x - p_.low - position + 1, 0, positions_) * p_.ratio);
        std::fill(row, row + low, -kInfinity);
        std::fill(row + high, row + rows_, -kInfinity);
      }
    }
  }

  // Draws the dropout factors of the pairs.
  void draw(int64_t begin, int64_t keys, const uint32_t* queries, Scratch& s) const {
    for (int64_t x = 0; x < keys; x++) {
      float* row = s.kept.data() + x * rows_;
      const uint32_t key = s.key_counters[begin + x];
      for (int64_t c = 0; c < rows_; c++) row[c] = masks_.keeps(queries[c], key) ? masks_.keep_factor : 0.0f;
    }
  }

  // P and dS from scores and gradients of probabilities: in place for float32, rounded into other buffers for bfloat16.
  // Returns the sum of dS if the keys have a gate.
  template <bool is_gated>
  float differentiate(int64_t keys, const float* lse, const float* delta, float gate, Scratch& s) const {
    constexpr bool is_coarse = !std::is_same_v<T, float>;
    const Floats factor(scale_ * kLog2E), of_gate(gate * kLog2E);
    Floats sum(0.0f);
    for (int64_t x = 0; x < keys; x += kPairs) {
      for (int64_t c = 0; c < rows_; c += kLanes) {
        const Floats of_delta = Floats::loadu(delta + c);
        Floats of_lse = Floats::loadu(lse + c);
        if constexpr (is_gated) of_lse = of_lse - of_gate;
        Floats p[2], ds[2];
        for (int64_t y = 0; y < kPairs; y++) {
          const int64_t at = (x + y) * rows_ + c;
          Floats grad = Floats::loadu(s.grad_scores.data() + at);
          p[y] = exp2<is_coarse>(at::vec::fmsub(Floats::loadu(s.scores.data() + at), factor, of_lse));
          if (masks_.is_dropped) {
            const Floats kept = Floats::loadu(s.kept.data() + at);
            ds[y] = p[y] * (grad * kept - of_delta);
            p[y] = p[y] * kept;
          } else {
            ds[y] = p[y] * (grad - of_delta);
          }
          if constexpr (is_gated) sum = sum + ds[y];
          if constexpr (kPairs == 1) {
            p[y].store((masks_.is_dropped ? s.kept : s.scores).data() + at);
            ds[y].store(s.grad_scores.data() + at);
          }
        }
        if constexpr (kPairs == 2) {
          store_rows(s.probabilities.data() + x * rows_ + c, rows_, p[0], p[1]);
          store_rows(s.rounded.data() + x * rows_ + c, rows_, ds[0], ds[1]);
          store_interleaved(s.paired.data() + x * rows_ + 2 * c, ds[0], ds[1]);
        }
      }
    }
    return is_gated ? sum_of(sum) : 0.0f;
  }

  void add_to_keys(const Domain& d, int64_t first, int64_t count, const Scratch& s) const {
    for (int64_t x = 0; x < count; x++) {
      const int64_t row = p_.key_row(d, first + x);
      float *key = grad_key_.at(d.batch, row, d.head), *value = grad_value_.at(d.batch, row, d.head);
      const float *of_key = s.grad_keys.data() + x * p_.head_dim, *of_value = s.grad_values.data() + x * p_.head_dim;
      for (int64_t c = 0; c < p_.head_dim; c++) key[c] += of_key[c] * scale_;
      for (int64_t c = 0; c < p_.head_dim; c++) value[c] += of_value[c];
    }
  }

  void add_to_queries(const Domain& d, const Tile& tile, const float* grads, float* lines) const {
    transpose(grads, rows_, lines, p_.head_dim, p_.head_dim, rows_);
    for (int64_t i = tile.first; i < tile.stop; i++)
      for (int64_t g = 0; g < p_.ratio; g++, lines += p_.head_dim) {
        float* to = grad_query_.at(d.batch, p_.query_row(d, p_.problems[tile.problem], i), d.head * p_.ratio + g);
        for (int64_t c = 0; c < p_.head_dim; c++) to[c] += lines[c] * scale_;
      }
  }

  const Partial& p_;
  const Masks& masks_;
  const Rows<const T> query_, key_, value_, out_, grad_out_;
  const Rows<const float> lse_, grad_lse_;
  const bool has_grad_lse_;
  const Rows<float> grad_query_, grad_key_, grad_value_;
  const float scale_;
  const int64_t width_, keys_of_block_, positions_, rows_;
  const std::vector<Tile> tiles_;
  const double operations_;
  const int64_t threads_, splits_, most_tiles_;
};

}  // namespace

void backward(const Partial& partial, const Masks& masks, const BackwardOperands& operands) {
  switch (operands.query.scalar_type()) {
    case at::kFloat: return Backward<float>(partial, masks, operands).run();
    case at::kBFloat16: return Backward<BFloat16>(partial, masks, operands).run();
    default: return Backward<Half>(partial, masks, operands).run();
  }
}

}  // namespace dilated_attention
