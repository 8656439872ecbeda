#include "kernels.h"
#include "packing.h"

namespace dilated_attention {
namespace {

constexpr int64_t kRowsOfTile = 64;
constexpr int64_t kKeysOfBlock = 128;
constexpr int64_t kKeysOfSplit = 1024;  // fewer keys are not worth a separate thread

// Gradients of a line by each of several pieces of work, which are added up in order.
class LineGradients {
 public:
  // The distances of a partial's pairs alone; with coordinates, one number for each of the `blocks` of keys of a piece,
  // so that the number of pieces changes no sum.
  LineGradients(const Partial& partial, const Terms& terms, const std::optional<at::Tensor>& grad, int64_t pieces, int64_t blocks)
      : ratio_(partial.ratio), length_(terms.length), step_(terms.coordinates == nullptr ? 1 : 0),
        grad_(grad ? grad->mutable_data_ptr<float>() : nullptr) {
    if (grad_ == nullptr) return;
    if (terms.coordinates != nullptr) {
      size_ = blocks;
      sums_.resize(pieces * ratio_ * size_);
      return;
    }
    int64_t least = kNoBound, most = -kNoBound;
    for (const Problem& problem : partial.problems)
      for (int64_t i = 0; i < problem.count; i++) {
        least = std::min(least, partial.query_index(problem, i));
        most = std::max(most, partial.query_index(problem, i));
      }
    begin_ = std::clamp<int64_t>(terms.origin - most, 0, length_);
    size_ = std::clamp<int64_t>(terms.origin + partial.num_keys - least, begin_, length_) - begin_;
    sums_.resize(pieces * ratio_ * size_);
  }

  bool are_needed() const { return grad_ != nullptr; }

  void add(int64_t piece, int64_t query_head, int64_t index, float number) {
    if (index < begin_ || index >= begin_ + size_) return;  // of the zeros that fill up a block of keys
    sums_[(piece * ratio_ + query_head) * size_ + index - begin_] += number;
  }

  // Adds a piece's gradients to those of the query heads of key/value head `head`, and clears them.
  void finish(int64_t piece, int64_t head) {
    if (grad_ == nullptr) return;
    float* sums = sums_.data() + piece * ratio_ * size_;
    for (int64_t g = 0; g < ratio_; g++)
      for (int64_t x = 0; x < size_; x++) grad_[(head * ratio_ + g) * length_ + begin_ + x * step_] += sums[g * size_ + x];
    std::fill_n(sums, ratio_ * size_, 0.0f);
  }

 private:
  const int64_t ratio_, length_, step_;  // numbers of a line from one sum to the next
  float* const grad_;
  int64_t begin_ = 0, size_ = 0;
  std::vector<float> sums_;
};

// Gradients of one partial under the merged output O and log-sum-exp L: with P = exp(s - L) and
// dS = P (dP - rowsum(dO O) + dL), dV = P' dO, dK = dS' Q and dQ = dS K. Scores are computed transposed, [keys, queries]:
// L and the number subtracted from dP are then per column, and P and dS are left operands without a transpose. Under
// terms, dS is the gradient of a line and of the keys' bias, and dS' = dS cap'(scale q.k) replaces it in dK and dQ.
template <class T>
class Backward {
  using C = Factor<T>;
  static constexpr int64_t kPairs = kPair<C>;

 public:
  Backward(const Partial& partial, const Masks& masks, const BackwardOperands& x)
      : p_(partial), masks_(masks), terms_(x.terms), has_terms_(x.terms.are_present()), query_(x.query),
        key_(x.key, x.of_keys.row, x.of_keys.head), value_(x.value, x.of_keys.row, x.of_keys.head), out_(x.out), grad_out_(x.grad_out),
        lse_(x.lse), grad_lse_(x.grad_lse ? *x.grad_lse : x.lse), has_grad_lse_(x.grad_lse.has_value()),
        grad_query_(x.grad_query, x.of_grad_query.row, x.of_grad_query.head * partial.ratio),
        grad_key_(x.grad_key, x.of_grad_keys.row, x.of_grad_keys.head),
        grad_value_(x.grad_value, x.of_grad_keys.row, x.of_grad_keys.head), factor_(x.terms.factor()),
        width_(rounded_up(partial.head_dim, kPairs)), value_width_(rounded_up(partial.value_dim, kPairs)),
        keys_of_block_(std::clamp(rounded_up(partial.num_keys, kAlignment), kAlignment, kKeysOfBlock)),
        positions_(std::min(positions_of_tile(partial), longest_problem(partial))),
        rows_(rounded_up(positions_ * partial.ratio, kAlignment)), tiles_(tiles_of(partial, positions_)),
        operations_(2.0 * (3 * partial.head_dim + 2 * partial.value_dim) * partial.pairs()),
        threads_(threads_for(operations_, 0.0)),
        splits_(splits_of(partial, threads_)), keys_of_share_(keys_of_share()), most_tiles_(std::clamp<int64_t>(
            kRowsOfChunk * (splits_ > 1 ? 4 * threads_ / splits_ : 1) /
                rounded_up(positions_of_tile(partial) * partial.ratio, kAlignment),
            1, tiles_.size())),
        grad_line_(
            partial, x.terms, x.grad_line, splits_ == 1 ? partial.domains.size() : splits_,
            (keys_of_share_ + keys_of_block_ - 1) / keys_of_block_) {
    if (x.grad_key_bias) grad_key_bias_.emplace(*x.grad_key_bias, x.of_keys.row, x.of_keys.head);
  }

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
    std::vector<float> lse, delta, coordinates;  // of a tile: x and y of its rows, and the bias of a unit of distance
    std::vector<uint32_t> counters;

    explicit Tiles(const Backward& b)
        : lse(b.most_tiles_ * b.rows_), delta(lse.size()), coordinates(b.terms_.coordinates != nullptr ? 3 * lse.size() : 0),
          counters(b.masks_.is_dropped ? lse.size() : 0) {
      const int64_t rows = b.most_tiles_ * b.rows_, of_queries = rows * b.width_, of_grads = rows * b.value_width_;
      queries_t = factors.at_least(2 * (of_queries + of_grads)), grads_t = queries_t + of_queries;
      queries = grads_t + of_grads, grads = queries + of_queries;
    }
  };

  struct Scratch {
    // A block of keys as left operands, and its gradients.
    std::vector<C> keys, values, keys_t;
    std::vector<float> grad_keys, grad_values, key_bias, grad_key_bias, key_coordinates;
    std::vector<uint32_t> key_counters;
    std::vector<uint8_t> is_hidden;
    bool has_hidden;
    // Per block and tile.
    std::vector<float> scores, grad_scores, kept, grad_units;
    std::vector<C> probabilities, rounded, paired;
    Buffer<float> line;

    explicit Scratch(const Backward& b) {
      for (auto* x : {&keys, &keys_t}) x->resize(b.keys_of_block_ * b.width_);
      values.resize(b.keys_of_block_ * b.value_width_);
      grad_keys.resize(b.keys_of_block_ * b.p_.head_dim);
      grad_values.resize(b.keys_of_block_ * b.p_.value_dim);
      key_bias.resize(b.keys_of_block_);
      grad_key_bias.resize(b.keys_of_block_ * kLanes);
      is_hidden.resize(b.keys_of_block_);
      key_coordinates.resize(b.terms_.coordinates != nullptr ? 2 * b.keys_of_block_ : 0);
      grad_units.resize(b.rows_);
      for (auto* x : {&scores, &grad_scores}) x->resize(b.keys_of_block_ * b.rows_);
      if (kPairs == 2)
        for (auto* x : {&probabilities, &rounded, &paired}) x->resize(b.keys_of_block_ * b.rows_);
      if (!b.masks_.is_dropped) return;
      key_counters.resize(b.keys_of_block_);
      kept.resize(2 * b.keys_of_block_ * b.rows_);
    }
  };

  // A unit with a gate belongs to one share, which adds up its gradient.
  int64_t keys_of_share() const {
    const int64_t whole = p_.has_gates() ? rounded_up(keys_of_block_, p_.unit) : keys_of_block_;
    return rounded_up((p_.num_keys + splits_ - 1) / splits_, whole);
  }

  // Number of shares into which the keys of a domain are split; 1 if there are enough domains for the threads.
  static int64_t splits_of(const Partial& partial, int64_t threads) {
    if (threads == 1 || static_cast<int64_t>(partial.domains.size()) >= 4 * threads) return 1;
    return std::clamp<int64_t>(partial.num_keys / kKeysOfSplit, 1, 2 * threads);
  }

  // One piece of work per domain.
  void run_domains() {
    const int64_t num_tiles = tiles_.size(), of_tile = rows_ * p_.head_dim;
    for_each_piece(p_.domains.size(), threads_, [&](const auto& next) {
      const WithoutSubnormals normal(terms_);
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
          add(domain, 0, p_.num_keys, first, tiles, packed, grads, has_grads.data(), piece, scratch);
          for (int64_t tile = 0; tile < tiles; tile++)
            if (has_grads[tile]) add_to_queries(domain, tiles_[first + tile], grads + tile * of_tile, lines);
        }
      at::native::cpublas::brgemm_release(kPairs == 2);
    });
    for (size_t domain = 0; domain < p_.domains.size(); domain++) grad_line_.finish(domain, p_.domains[domain].head);
  }

  // For few domains: the keys of one are split into shares, and every share has its own gradient of the queries.
  void run_shares(const Domain& domain) {
    const int64_t num_tiles = tiles_.size(), of_tile = rows_ * p_.head_dim;
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
        const WithoutSubnormals normal(terms_);
        Scratch scratch(*this);
        for (int64_t share; (share = next()) >= 0;) {
          const int64_t begin = share * keys_of_share_, end = std::min(begin + keys_of_share_, p_.num_keys);
          add(domain, begin, end, first, tiles, packed, shares + share * tiles * of_tile, has_grads.data() + share * tiles, share, scratch);
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
    for (int64_t share = 0; share < splits_; share++) grad_line_.finish(share, domain.head);
  }

  static int64_t positions_of_tile(const Partial& partial) { return std::max<int64_t>(1, kRowsOfTile / partial.ratio); }

  void pack_tile(const Domain& d, const Tile& tile, int64_t place, Tiles& packed, Buffer<C>& memory) const {
    const Problem& problem = p_.problems[tile.problem];
    const int64_t rows = (tile.stop - tile.first) * p_.ratio, at = place * rows_ * width_, at_grads = place * rows_ * value_width_;
    const auto copy = [&](const Rows<const T>& from, int64_t dim, int64_t width, C* transposed, C* paired) {
      C* lines = kPairs == 1 ? paired : memory.at_least(rows_ * std::max(width_, value_width_));
      C* to = lines;
      for (int64_t i = tile.first; i < tile.stop; i++)
        for (int64_t g = 0; g < p_.ratio; g++, to += width) {
          convert(from.at(d.batch, p_.query_row(d, problem, i), d.head * p_.ratio + g), to, dim);
          if (dim < width) to[dim] = C(0);
        }
      std::fill(to, lines + rows_ * width, C(0));
      pack_transposed(lines, width, transposed, rows_, rows_, width);
      if constexpr (kPairs == 2) pack_rows(lines, width, paired, rows_, width);
    };
    copy(query_, p_.head_dim, width_, packed.queries_t + at, packed.queries + at);
    copy(grad_out_, p_.value_dim, value_width_, packed.grads_t + at_grads, packed.grads + at_grads);
    float *lse = packed.lse.data() + place * rows_, *delta = packed.delta.data() + place * rows_;
    std::fill(lse + rows, lse + rows_, kInfinity);
    std::fill(delta + rows, delta + rows_, 0.0f);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t row = p_.query_row(d, problem, tile.first + r / p_.ratio), head = d.head * p_.ratio + r % p_.ratio;
      const float of_row = *lse_.at(d.batch, row, head);
      if (masks_.is_dropped) packed.counters[place * rows_ + r] = masks_.of_query(d.batch, head, row);
      if (terms_.coordinates != nullptr) {
        const float* coordinates = terms_.of_query_row(d, row);
        float* of_tile = packed.coordinates.data() + 3 * place * rows_ + r;
        of_tile[0] = coordinates[0], of_tile[rows_] = coordinates[terms_.num_rows], of_tile[2 * rows_] = terms_.line[head];
      }
      // The probabilities of a row without a key are 0.
      lse[r] = of_row == -kInfinity ? kInfinity : of_row * kLog2E;
      delta[r] = of_row == -kInfinity ? 0.0f
                                      : dot(out_.at(d.batch, row, head), grad_out_.at(d.batch, row, head), p_.value_dim) -
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
      if (has_terms_) s.key_bias[x] = s.is_hidden[x] ? 0.0f : terms_.of_key(d, row);
      if (terms_.coordinates != nullptr) {
        const float* of_row = s.is_hidden[x] ? nullptr : terms_.of_key_row(d, row);
        s.key_coordinates[x] = of_row == nullptr ? 0.0f : of_row[0];
        s.key_coordinates[keys_of_block_ + x] = of_row == nullptr ? 0.0f : of_row[terms_.num_rows];
      }
    }
    if (num_hidden == keys_of_block_) return false;
    s.has_hidden = num_hidden > keys_of_block_ - count;
    const auto copy = [&](const Rows<const T>& from, int64_t dim, int64_t width, C* to) {
      for (int64_t x = 0; x < keys_of_block_; x++, to += width) {
        if (!s.is_hidden[x]) convert(from.at(d.batch, p_.key_row(d, first + x), d.head), to, dim);
        if (s.is_hidden[x]) std::fill(to, to + width, C(0));
        if (dim < width) to[dim] = C(0);
      }
    };
    copy(key_, p_.head_dim, width_, s.keys.data());
    copy(value_, p_.value_dim, value_width_, s.values.data());
    transpose(s.keys.data(), width_, s.keys_t.data(), keys_of_block_, keys_of_block_, p_.head_dim);
    std::fill(s.grad_keys.begin(), s.grad_keys.end(), 0.0f);
    std::fill(s.grad_values.begin(), s.grad_values.end(), 0.0f);
    std::fill(s.grad_key_bias.begin(), s.grad_key_bias.end(), 0.0f);
    return true;
  }

  // Adds the contributions of the keys [begin, end) and the tiles from `first_tile` on. `grads` are set to the tiles'
  // query gradients, transposed, where `has_grads` is set.
  void add(
      const Domain& d, int64_t begin, int64_t end, int64_t first_tile, int64_t tiles, const Tiles& packed, float* grads,
      uint8_t* has_grads, int64_t piece, Scratch& s) {
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
          add_tile(d, tile, first, run, place, packed, grads, has_grads[place], piece, (first - begin) / keys_of_block_, s);
          has_grads[place] = true;
        });
      }
      if (is_packed && is_seen) add_to_keys(d, first, stop - first, s);
    }
  }

  void add_tile(
      const Domain& d, const Tile& tile, int64_t first, const Run& of_keys, int64_t place, const Tiles& packed, float* grads,
      bool is_added, int64_t piece, int64_t block, Scratch& s) {
    const int64_t run = of_keys.begin - first, run_end = of_keys.end - first;
    const int64_t begin = run / kAlignment * kAlignment, keys = rounded_up(run_end - begin, kAlignment);
    const int64_t at = place * rows_ * width_, at_grads = place * rows_ * value_width_;
    const int64_t head_dim = p_.head_dim, value_dim = p_.value_dim;
    multiply(keys, rows_, width_, s.keys.data() + begin * width_, width_, packed.queries_t + at, rows_, s.scores.data(), rows_, false);
    multiply(
        keys, rows_, value_width_, s.values.data() + begin * value_width_, value_width_, packed.grads_t + at_grads, rows_,
        s.grad_scores.data(), rows_, false);
    mask(tile, first, begin, keys, run, run_end, s);
    if (masks_.is_dropped) draw(begin, keys, packed.counters.data() + place * rows_, s);
    const float *lse = packed.lse.data() + place * rows_, *delta = packed.delta.data() + place * rows_;
    if (terms_.coordinates != nullptr) {
      const float* coordinates = packed.coordinates.data() + 3 * place * rows_;
      std::fill(s.grad_units.begin(), s.grad_units.end(), 0.0f);
      const float of_gate = differentiate<true, true, true>(begin, keys, lse, delta, of_keys.gate, {}, s, coordinates);
      if (of_keys.grad_gate != nullptr) *of_keys.grad_gate += of_gate;
      for (int64_t r = 0; r < (tile.stop - tile.first) * p_.ratio && grad_line_.are_needed(); r++)
        grad_line_.add(piece, r % p_.ratio, block, s.grad_units[r]);
    } else if (has_terms_) {
      const Distances distances = distances_of(d, tile, first + begin, keys, s);
      const float of_gate = differentiate<true, true>(begin, keys, lse, delta, of_keys.gate, distances, s);
      if (of_keys.grad_gate != nullptr) *of_keys.grad_gate += of_gate;
      add_to_line(tile, distances, piece);
    } else if (of_keys.grad_gate != nullptr) {
      *of_keys.grad_gate += differentiate<true, false>(begin, keys, lse, delta, of_keys.gate, {}, s);
    } else {
      differentiate<false, false>(begin, keys, lse, delta, 0.0f, {}, s);
    }
    const C *probabilities, *rounded, *paired;
    if constexpr (kPairs == 2) {
      probabilities = s.probabilities.data(), rounded = s.rounded.data(), paired = s.paired.data();
    } else {
      probabilities = masks_.is_dropped ? s.kept.data() : s.scores.data(), rounded = paired = s.grad_scores.data();
    }
    multiply(
        keys, value_dim, rows_, probabilities, rows_, packed.grads + at_grads, value_width_,
        s.grad_values.data() + begin * value_dim, value_dim, true);
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

  // Numbers of the line for the pairs of a tile with `keys` keys from `key` on: of pair (x, c) at `first + x * of_key + c`.
  // Pairs of one distance share a number unless the rows of the tile are listed.
  struct Distances {
    int64_t key = 0, keys = 0, first = 0, of_key = 0;
    float *numbers = nullptr, *grads = nullptr;
  };

  // Calls `body(place, head, index)` for all numbers: at `place`, for the `head`-th query head of a key/value head.
  template <class Body>
  void for_each_number(const Tile& tile, const Distances& x, Body body) const {
    const Problem& problem = p_.problems[tile.problem];
    const int64_t queries = tile.stop - tile.first;
    const auto visit = [&](int64_t place, int64_t distance) {
      const int64_t index = terms_.origin + distance;
      if (index < 0 || index >= terms_.length) return;
      for (int64_t g = 0; g < p_.ratio; g++) body(place + g, g, index);
    };
    if (problem.rows == nullptr) {
      const int64_t last = x.key + x.keys - 1 - p_.position(tile);
      for (int64_t u = 0; u < queries + x.keys - 1; u++) visit(u * p_.ratio, last - u);
    } else {
      for (int64_t y = 0; y < x.keys; y++)
        for (int64_t m = 0; m < queries; m++) visit(y * rows_ + m * p_.ratio, x.key + y - problem.rows[tile.first + m]);
    }
  }

  Distances distances_of(const Domain& d, const Tile& tile, int64_t key, int64_t keys, Scratch& s) const {
    if (terms_.line == nullptr) return {};
    const bool is_listed = p_.problems[tile.problem].rows != nullptr;
    Distances x{key, keys, is_listed ? 0 : (keys - 1) * p_.ratio, is_listed ? rows_ : -p_.ratio};
    const int64_t size = (keys - 1) * std::abs(x.of_key) + rows_;
    x.numbers = s.line.at_least(2 * size);
    std::fill_n(x.numbers, 2 * size, 0.0f);
    if (grad_line_.are_needed()) x.grads = x.numbers + size;
    for_each_number(tile, x, [&](int64_t place, int64_t head, int64_t index) {
      x.numbers[place] = terms_.line[(d.head * p_.ratio + head) * terms_.length + index];
    });
    return x;
  }

  void add_to_line(const Tile& tile, const Distances& x, int64_t piece) {
    if (x.grads == nullptr) return;
    for_each_number(tile, x, [&](int64_t place, int64_t head, int64_t index) { grad_line_.add(piece, head, index, x.grads[place]); });
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
  // The first of the keys is the block's key `begin`. Returns the sum of dS if the keys have a gate. `coordinates`: of
  // the tile's rows.
  template <bool is_gated, bool has_terms, bool has_coordinates = false>
  float differentiate(
      int64_t begin, int64_t keys, const float* lse, const float* delta, float gate, const Distances& distances, Scratch& s,
      const float* coordinates = nullptr) const {
    constexpr bool is_coarse = !std::is_same_v<T, float>;
    const Terms terms = terms_;  // in registers: no number that is stored is one of its own
    const Floats factor(factor_), of_gate(gate * kLog2E);
    Floats sum(0.0f);
    for (int64_t x = 0; x < keys; x += kPairs) {
      Floats of_keys[2] = {Floats(0.0f), Floats(0.0f)};
      for (int64_t c = 0; c < rows_; c += kLanes) {
        const Floats of_delta = Floats::loadu(delta + c);
        Floats of_lse = Floats::loadu(lse + c);
        if constexpr (is_gated) of_lse = of_lse - of_gate;
        Floats p[2], ds[2];
        for (int64_t y = 0; y < kPairs; y++) {
          const int64_t at = (x + y) * rows_ + c;
          Floats grad = Floats::loadu(s.grad_scores.data() + at);
          Floats score = Floats::loadu(s.scores.data() + at), slope(1.0f), length(0.0f);
          if constexpr (has_terms) {
            const auto is_masked = score == Floats(-kInfinity);
            std::tie(score, slope) = terms.cap(score);
            score = score + Floats(s.key_bias[begin + x + y]);
            if constexpr (has_coordinates) {
              const float* of_key = s.key_coordinates.data() + begin + x + y;
              length = length_of(
                  Floats::loadu(coordinates + c) - Floats(of_key[0]), Floats::loadu(coordinates + rows_ + c) - Floats(of_key[keys_of_block_]));
              score = score + Floats::loadu(coordinates + 2 * rows_ + c) * length;
            }
            if (distances.numbers != nullptr)
              score = score + Floats::loadu(distances.numbers + distances.first + (x + y) * distances.of_key + c);
            score = Floats::blendv(score, Floats(-kInfinity), is_masked);
          }
          p[y] = exp2<is_coarse>(at::vec::fmsub(score, factor, of_lse));
          if (masks_.is_dropped) {
            const Floats kept = Floats::loadu(s.kept.data() + at);
            ds[y] = p[y] * (grad * kept - of_delta);
            p[y] = p[y] * kept;
          } else {
            ds[y] = p[y] * (grad - of_delta);
          }
          if constexpr (is_gated) sum = sum + ds[y];
          if constexpr (has_terms) {
            of_keys[y] = of_keys[y] + ds[y];
            if constexpr (has_coordinates) {
              float* to = s.grad_units.data() + c;
              at::vec::fmadd(ds[y], length, Floats::loadu(to)).store(to);
            }
            if (distances.grads != nullptr) {
              float* to = distances.grads + distances.first + (x + y) * distances.of_key + c;
              (Floats::loadu(to) + ds[y]).store(to);
            }
            ds[y] = ds[y] * slope;
          }
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
      for (int64_t y = 0; y < kPairs && has_terms; y++) {
        float* to = s.grad_key_bias.data() + (begin + x + y) * kLanes;
        (Floats::loadu(to) + of_keys[y]).store(to);
      }
    }
    return is_gated ? sum_of(sum) : 0.0f;
  }

  void add_to_keys(const Domain& d, int64_t first, int64_t count, const Scratch& s) const {
    for (int64_t x = 0; x < count; x++) {
      const int64_t row = p_.key_row(d, first + x);
      float *key = grad_key_.at(d.batch, row, d.head), *value = grad_value_.at(d.batch, row, d.head);
      if (grad_key_bias_) *grad_key_bias_->at(d.batch, row, d.head) += sum_of(Floats::loadu(s.grad_key_bias.data() + x * kLanes));
      const float *of_key = s.grad_keys.data() + x * p_.head_dim, *of_value = s.grad_values.data() + x * p_.value_dim;
      for (int64_t c = 0; c < p_.head_dim; c++) key[c] += of_key[c] * terms_.scale;
      for (int64_t c = 0; c < p_.value_dim; c++) value[c] += of_value[c];
    }
  }

  void add_to_queries(const Domain& d, const Tile& tile, const float* grads, float* lines) const {
    transpose(grads, rows_, lines, p_.head_dim, p_.head_dim, rows_);
    for (int64_t i = tile.first; i < tile.stop; i++)
      for (int64_t g = 0; g < p_.ratio; g++, lines += p_.head_dim) {
        float* to = grad_query_.at(d.batch, p_.query_row(d, p_.problems[tile.problem], i), d.head * p_.ratio + g);
        for (int64_t c = 0; c < p_.head_dim; c++) to[c] += lines[c] * terms_.scale;
      }
  }

  const Partial& p_;
  const Masks& masks_;
  const Terms& terms_;
  const bool has_terms_;
  const Rows<const T> query_, key_, value_, out_, grad_out_;
  const Rows<const float> lse_, grad_lse_;
  const bool has_grad_lse_;
  const Rows<float> grad_query_, grad_key_, grad_value_;
  const float factor_;
  const int64_t width_, value_width_, keys_of_block_, positions_, rows_;
  const std::vector<Tile> tiles_;
  const double operations_;
  const int64_t threads_, splits_, keys_of_share_, most_tiles_;
  LineGradients grad_line_;
  std::optional<Rows<float>> grad_key_bias_;
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
