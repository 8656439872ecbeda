// Who sees whom under a pattern, and how far that reaches: the library's definitions (src/dilated_attention_pytorch/
// patterns) in plain JavaScript. tests/patterns/test_pattern_page.py compares the two on drawn patterns.
"use strict";

const Patterns = (() => {
  const LARGEST = { length: 1024, heads: 16, layers: 16 };
  const MOST_SUMMANDS = 255; // counts are bytes
  const modulo = (a, b) => ((a % b) + b) % b;
  const gcd = (a, b) => (b === 0 ? a : gcd(b, a % b));

  // What is wrong with the settings, as [name of the field, sentence]; an empty list if nothing is. What a field holds
  // that is no number is there as its text.
  function problems(settings) {
    const found = [];
    const integer = (name, value, least, most, what) => {
      if (!Number.isSafeInteger(value) || value < least || value > most) {
        const range = most === Infinity ? `of at least ${least}` : `between ${least} and ${most}`;
        found.push([name, `${what} must be an integer ${range}, got ${shown(value)}.`]);
      }
    };
    const all = (name, values, least, what) =>
      values.forEach((value) => integer(name, value, least, Infinity, what));
    integer("length", settings.length, 1, LARGEST.length, "Positions");
    integer("heads", settings.heads, 1, LARGEST.heads, "Key/value heads");
    integer("layers", settings.layers, 1, LARGEST.layers, "Layers");
    all("segmentLengths", settings.segmentLengths, 1, "A segment length");
    all("dilationRates", settings.dilationRates, 1, "A dilation rate");
    all("segmentShift", settings.segmentShift, 0, "A segment shift");
    const [lengths, rates] = [settings.segmentLengths.length, settings.dilationRates.length];
    if (lengths !== rates) {
      const sentence = `Every segment length has one dilation rate, got ${lengths} lengths and ${rates} rates.`;
      found.push(["dilationRates", sentence]);
    }
    if (lengths > MOST_SUMMANDS) found.push(["segmentLengths", `At most ${MOST_SUMMANDS} segment lengths.`]);
    if (lengths > 0 && settings.segmentShift.length === 0)
      found.push(["segmentShift", "Write a shift, 0 for none."]);
    if (settings.window) {
      integer("before", settings.window[0], 0, Infinity, "Positions before");
      integer("after", settings.window[1], 0, Infinity, "Positions after");
    }
    integer("globalTokens", settings.globalTokens, 0, Infinity, "Global tokens");
    const blocks = settings.blocks;
    if (blocks) {
      integer("blockSize", blocks.blockSize, 1, Infinity, "The block size");
      if (blocks.kind === "strided") integer("stride", blocks.stride, 1, Infinity, "The stride");
      if (blocks.kind === "random") {
        integer("outOf", blocks.outOf, 1, 64, "Out of how many blocks");
        integer("some", blocks.some, 1, blocks.outOf, "Blocks that are seen");
        integer("seed", blocks.seed, 0, Infinity, "The seed");
      }
      if (blocks.kind === "hierarchical") {
        integer("near", blocks.near, 1, Infinity, "Near blocks");
        integer("levels", blocks.levels, 1, 31, "Levels");
        integer("factor", blocks.factor, 2, Infinity, "The factor");
        if (blocks.near * blocks.factor ** (blocks.levels - 1) >= 2 ** 31)
          found.push(["levels", "near * factor^(levels - 1) must stay below 2^31: take fewer levels."]);
      }
    }
    if (found.length === 0 && lengths === 0 && !settings.window && settings.globalTokens === 0 && !blocks)
      found.push(["segmentLengths", "Nothing is seen: set segments, a window, global tokens or blocks."]);
    return found;
  }

  function shown(value) {
    return typeof value === "number" ? String(value) : `"${value}"`;
  }

  // The pattern as Python makes it.
  function expression(settings) {
    const parts = [];
    const list = (values) => `[${values.join(", ")}]`;
    if (settings.segmentLengths.length > 0) {
      const shifts = settings.segmentShift;
      let text = `DilatedPattern(${list(settings.segmentLengths)}, ${list(settings.dilationRates)}`;
      if (settings.offsetRule !== "modulo") text += `, offset_rule="${settings.offsetRule}"`;
      if (shifts.some((shift) => shift !== 0))
        text += `, segment_shift=${shifts.length === 1 ? shifts[0] : list(shifts)}`;
      parts.push(`${text})`);
    }
    if (settings.window) parts.push(`local_window(${settings.window[0]}, ${settings.window[1]})`);
    if (settings.globalTokens > 0) parts.push(`global_tokens(${settings.globalTokens})`);
    const blocks = settings.blocks;
    if (blocks) {
      const size = `block_size=${blocks.blockSize}`;
      if (blocks.kind === "strided") parts.push(`strided_blocks(${blocks.stride}, ${size})`);
      if (blocks.kind === "random")
        parts.push(`random_blocks(${blocks.some / blocks.outOf}, seed=${blocks.seed}, ${size})`);
      if (blocks.kind === "hierarchical")
        parts.push(`hierarchical(${blocks.near}, levels=${blocks.levels}, factor=${blocks.factor}, ${size})`);
    }
    return parts.join(" + ");
  }

  // The count c[p, t] of one key/value head, row by row: Uint8Array of length * length.
  function counts(settings, head) {
    const length = settings.length;
    const found = new Uint8Array(length * length);
    const add = (sees) => {
      for (let p = 0; p < length; p++) {
        const end = settings.isCausal ? p + 1 : length;
        for (let t = 0; t < end; t++) if (sees(p, t)) found[p * length + t]++;
      }
    };
    settings.segmentLengths.forEach((segment, i) => {
      const rate = settings.dilationRates[i];
      const offset =
        settings.offsetRule === "modulo" ? head % rate : Math.floor(head / Math.ceil(settings.heads / rate));
      const shift = settings.segmentShift[head % settings.segmentShift.length] % segment;
      // The number of a position's segment, or -1 where the position is not selected.
      const segmentOf = Int32Array.from({ length }, (_, p) =>
        ((p + shift) % segment) % rate === offset ? Math.floor((p + shift) / segment) : -1,
      );
      add((p, t) => segmentOf[p] >= 0 && segmentOf[p] === segmentOf[t]);
    });
    if (settings.window) {
      const [before, after] = settings.window;
      add((p, t) => t >= p - before && t <= p + after);
    }
    if (settings.globalTokens > 0) add((p, t) => p < settings.globalTokens || t < settings.globalTokens);
    if (settings.blocks) {
      const size = settings.blocks.blockSize;
      const number = Math.ceil(length / size);
      const mask = blockMask(settings.blocks, number, head);
      const blockOf = Int32Array.from({ length }, (_, p) => Math.floor(p / size));
      add((p, t) => mask[blockOf[p] * number + blockOf[t]] === 1);
    }
    return found;
  }

  // Which of so many key blocks every query block sees.
  function blockMask(blocks, number, head) {
    const mask = new Uint8Array(number * number);
    if (blocks.kind === "random") return randomMask(blocks, number, head, mask);
    for (let i = 0; i < number; i++)
      for (let j = 0; j < number; j++) {
        const seen = blocks.kind === "strided" ? modulo(i - j, blocks.stride) === 0 : isNearOrCoarse(blocks, i, j);
        mask[i * number + j] = seen ? 1 : 0;
      }
    return mask;
  }

  function isNearOrCoarse({ near, levels, factor }, i, j) {
    const distance = Math.abs(i - j);
    if (distance < near) return true;
    for (let level = 1; level < levels; level++) {
      const coarse = factor ** level;
      if (distance < near * coarse) return j % coarse === coarse - 1;
    }
    return false;
  }

  // Of every outOf consecutive key blocks a query block sees those with the least draws, as signed numbers of 64 bits.
  function randomMask(blocks, number, head, mask) {
    const divisor = gcd(blocks.some, blocks.outOf);
    const [some, outOf] = [blocks.some / divisor, blocks.outOf / divisor];
    const ofHead = splitmix64(splitmix64(BigInt(blocks.seed)) ^ BigInt(head));
    for (let i = 0; i < number; i++) {
      const ofRow = splitmix64(ofHead ^ BigInt(i));
      for (let first = 0; first < number; first += outOf) {
        const draws = Array.from({ length: outOf }, (_, n) => [
          BigInt.asIntN(64, splitmix64(ofRow ^ BigInt(first + n))),
          first + n,
        ]);
        draws.sort(([a, i], [b, j]) => (a < b ? -1 : a > b ? 1 : i - j));
        for (const [, j] of draws.slice(0, some)) if (j < number) mask[i * number + j] = 1;
      }
    }
    return mask;
  }

  // One step of splitmix64 and its finaliser (Steele et al. 2014), of unsigned numbers.
  function splitmix64(state) {
    state = BigInt.asUintN(64, state + 0x9e3779b97f4a7c15n);
    state = BigInt.asUintN(64, (state ^ (state >> 30n)) * 0xbf58476d1ce4e5b9n);
    state = BigInt.asUintN(64, (state ^ (state >> 27n)) * 0x94d049bb133111ebn);
    return state ^ (state >> 31n);
  }

  // What all heads compute: pairs, those of dense attention, and the one divided by the other.
  function cost(settings, countsOfHeads) {
    const length = settings.length;
    let pairs = 0;
    for (const found of countsOfHeads) for (const count of found) pairs += count;
    const dense = settings.heads * (settings.isCausal ? (length * (length + 1)) / 2 : length * length);
    return { pairs, dense, density: pairs / dense };
  }

  // The number of layers after which position p depends on the token at t: Int16Array of length * length, -1 for never.
  // A layer mixes its heads and keeps what was there.
  function firstLayers(settings, countsOfHeads) {
    const length = settings.length;
    const words = Math.ceil(length / 32);
    const own = new Uint32Array(length * words); // rows of bits: what each position has reached
    const first = new Int16Array(length * length).fill(-1);
    const keysOf = Array.from({ length }, (_, p) => {
      const keys = [];
      for (let t = 0; t < length; t++)
        if (t === p || countsOfHeads.some((found) => found[p * length + t] > 0)) keys.push(t);
      return keys;
    });
    for (let p = 0; p < length; p++) {
      own[p * words + (p >> 5)] |= 1 << (p & 31);
      first[p * length + p] = 0;
    }
    let reached = own;
    for (let layer = 1; layer <= settings.layers; layer++) {
      const now = new Uint32Array(length * words);
      for (let p = 0; p < length; p++) {
        for (const t of keysOf[p]) for (let w = 0; w < words; w++) now[p * words + w] |= reached[t * words + w];
        for (let t = 0; t < length; t++)
          if (first[p * length + t] < 0 && (now[p * words + (t >> 5)] >>> (t & 31)) & 1)
            first[p * length + t] = layer;
      }
      reached = now;
    }
    return first;
  }

  // For every layer from 0 on the number of pairs at each distance that are reached: layers + 1 arrays.
  function byDistance(settings, first) {
    const length = settings.length;
    const found = Array.from({ length: settings.layers + 1 }, () => new Array(length).fill(0));
    for (let p = 0; p < length; p++)
      for (let t = 0; t < length; t++) {
        const layer = first[p * length + t];
        if (layer >= 0) found[layer][Math.abs(p - t)]++;
      }
    for (let layer = 1; layer <= settings.layers; layer++)
      for (let d = 0; d < length; d++) found[layer][d] += found[layer - 1][d];
    return found;
  }

  // All of it for settings without problems.
  function measure(settings) {
    const countsOfHeads = Array.from({ length: settings.heads }, (_, head) => counts(settings, head));
    const first = firstLayers(settings, countsOfHeads);
    return { countsOfHeads, ...cost(settings, countsOfHeads), first, byDistance: byDistance(settings, first) };
  }

  return { problems, expression, measure };
})();
