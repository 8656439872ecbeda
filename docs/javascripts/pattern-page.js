// The form and the pictures of the page "See a pattern"; what they show is computed by pattern.js.
"use strict";

(() => {
  const EXAMPLES = {
    "LongNet": {},
    "LongNet, all offsets alike": { dilationRates: "1, 2, 4", heads: "1" },
    "Window and global tokens (Longformer)": {
      segmentLengths: "", dilationRates: "", hasWindow: true, before: "4", globalTokens: "2", heads: "1",
    },
    "Window, global and random blocks (BigBird)": {
      segmentLengths: "", dilationRates: "", hasWindow: true, before: "6", after: "6", globalTokens: "4",
      blocks: "random", some: "1", outOf: "8", heads: "2", causal: false,
    },
    "Strided blocks and a window (Sparse Transformer)": {
      segmentLengths: "", dilationRates: "", hasWindow: true, before: "7", blocks: "strided", stride: "8",
      blockSize: "1", heads: "1",
    },
    "Finer near, coarser far": {
      segmentLengths: "", dilationRates: "", blocks: "hierarchical", near: "2", levels: "3", blockSize: "4", heads: "1",
    },
  };
  const byId = (id) => document.getElementById(id);
  const form = byId("pattern-form");
  const fields = [...form.querySelectorAll("input, select")].filter((field) => field.id !== "example");
  const valueOf = (field) => (field.type === "checkbox" ? field.checked : field.value);
  const DEFAULTS = Object.fromEntries(fields.map((field) => [field.id, valueOf(field)]));
  let shown = null; // the last settings without problems and what they give
  let pair = { query: 0, key: 0 };

  function fill(values) {
    for (const field of fields) {
      const value = { ...DEFAULTS, ...values }[field.id];
      if (field.type === "checkbox") field.checked = value === true || value === "true";
      else field.value = value;
    }
  }

  // A number, or the text itself if it is none.
  const integer = (text) => (/^[0-9]+$/.test(text.trim()) ? Number(text) : text.trim());

  function integers(text) {
    return text.trim() === "" ? [] : text.trim().replace(/^\[|\]$/g, "").split(/[\s,]+/).map(integer);
  }

  function settingsOfForm() {
    const number = (id) => integer(byId(id).value);
    const kind = byId("blocks").value;
    const names = { strided: ["stride"], random: ["some", "outOf", "seed"], hierarchical: ["near", "levels", "factor"] };
    const blocks = { kind, blockSize: number("blockSize") };
    for (const name of names[kind] ?? []) blocks[name] = number(name);
    return {
      length: number("length"),
      heads: number("heads"),
      layers: number("layers"),
      isCausal: byId("causal").checked,
      segmentLengths: integers(byId("segmentLengths").value),
      dilationRates: integers(byId("dilationRates").value),
      offsetRule: byId("offsetRule").value,
      segmentShift: integers(byId("segmentShift").value),
      window: byId("hasWindow").checked ? [number("before"), number("after")] : null,
      globalTokens: number("globalTokens") || 0,
      blocks: kind === "none" ? null : blocks,
    };
  }

  function update() {
    const kind = byId("blocks").value;
    for (const label of form.querySelectorAll("[data-blocks]")) label.hidden = label.dataset.blocks !== kind;
    byId("blockSize").closest("label").hidden = kind === "none";
    for (const id of ["before", "after"]) byId(id).disabled = !byId("hasWindow").checked;
    const settings = settingsOfForm();
    const problems = Patterns.problems(settings);
    const wrong = new Set(problems.map(([name]) => name));
    for (const field of fields) field.setAttribute("aria-invalid", String(wrong.has(field.id)));
    byId("problems").textContent = problems.map(([, sentence]) => sentence).join(" ");
    if (problems.length > 0) return; // the last pattern without problems stays
    shown = { settings, ...Patterns.measure(settings) };
    pair = { query: Math.min(pair.query, settings.length - 1), key: Math.min(pair.key, settings.length - 1) };
    const head = Math.min(Number(byId("head").value || 0), settings.heads - 1);
    byId("head").replaceChildren(...Array.from({ length: settings.heads }, (_, i) => new Option(String(i), String(i))));
    byId("head").value = String(head);
    draw();
    remember();
  }

  // The address holds what differs from the page's own values, so that it can be sent to someone.
  function remember() {
    const changed = fields.filter((field) => valueOf(field) !== DEFAULTS[field.id]);
    const text = new URLSearchParams(changed.map((field) => [field.id, String(valueOf(field))])).toString();
    history.replaceState(null, "", text === "" ? location.pathname + location.search : `#${text}`);
  }

  const colors = () => {
    const style = getComputedStyle(byId("pattern-page"));
    return ["empty", "low", "high"].map((name) => style.getPropertyValue(`--cell-${name}`).trim().split(/\s+/).map(Number));
  };

  // From low to high, for part = 0 to 1.
  const between = (low, high, part) => low.map((from, i) => Math.round(from + (high[i] - from) * part));
  const css = (color) => `rgb(${color.join(" ")})`;

  function draw() {
    const { settings, countsOfHeads, density, pairs, dense } = shown;
    byId("expression").textContent = Patterns.expression(settings);
    byId("density").textContent = `${(100 * density).toFixed(2)} %`;
    byId("pairs").textContent = pairs.toLocaleString("en");
    byId("dense").textContent = dense.toLocaleString("en");
    byId("times").textContent = pairs === 0 ? "nothing to compute" : `${(1 / density).toPrecision(2)} times as much`;
    const counts = countsOfHeads[Number(byId("head").value)];
    const [empty, low, high] = colors();
    let most = 1; // of all heads, so that a color means one count
    for (const found of countsOfHeads) for (const count of found) most = Math.max(most, count);
    const ofCount = (count) => (count === 0 ? empty : between(low, high, most === 1 ? 1 : (count - 1) / (most - 1)));
    const ofLayer = (layer) => (layer < 0 ? empty : between(high, low, settings.layers === 1 ? 0 : Math.max(0, layer - 1) / (settings.layers - 1)));
    paint("mask", counts, ofCount);
    paint("reach", shown.first, ofLayer);
    const steps = Array.from({ length: most + 1 }, (_, count) => [ofCount(count), count === 0 ? "not seen" : `counts ${count}`]);
    legend("mask-legend", steps);
    const layers = Array.from({ length: settings.layers }, (_, i) => [ofLayer(i + 1), i === 0 ? "1 layer" : `${i + 1}`]);
    legend("reach-legend", [...layers, [ofLayer(-1), "out of reach"]]);
    chart(ofLayer);
    table();
    point();
  }

  function paint(id, values, colorOf) {
    const length = shown.settings.length;
    const canvas = byId(id).querySelector("canvas");
    canvas.width = canvas.height = length;
    // Where a cell is smaller than a pixel, neighbours are mixed rather than left out.
    canvas.style.imageRendering = length > canvas.clientWidth * devicePixelRatio ? "auto" : "pixelated";
    const context = canvas.getContext("2d");
    const image = context.createImageData(length, length);
    values.forEach((value, i) => image.data.set([...colorOf(value), 255], 4 * i));
    context.putImageData(image, 0, 0);
  }

  function legend(id, entries) {
    byId(id).replaceChildren(
      ...entries.map(([color, text]) => {
        const entry = document.createElement("span");
        const swatch = document.createElement("i");
        swatch.style.background = css(color);
        entry.append(swatch, text);
        return entry;
      }),
    );
  }

  // Pairs of positions at a distance.
  function pairsAt(distance) {
    const number = shown.settings.length - distance;
    return distance === 0 || shown.settings.isCausal ? number : 2 * number;
  }

  // Columns by distance: the part that one layer reaches in its color, above it what two reach, and so on.
  function chart(colorOf) {
    const { settings, byDistance } = shown;
    const svg = byId("chart");
    const width = Math.max(240, svg.clientWidth); // a unit is a pixel, so that the text is as large as the page's
    svg.setAttribute("viewBox", `0 0 ${width} 220`);
    const [left, top, right, bottom] = [46, 10, width - 4, 174];
    const x = (distance) => left + ((right - left) * distance) / settings.length;
    const y = (share) => bottom - (bottom - top) * share;
    const parts = [];
    const add = (name, attributes, text) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      if (text !== undefined) element.textContent = text;
      parts.push(element);
    };
    // The first layer last, so that it lies on top.
    for (let layer = settings.layers; layer >= 1; layer--) {
      const steps = byDistance[layer].map((count, d) => `V${y(count / pairsAt(d)).toFixed(1)}H${x(d + 1).toFixed(1)}`);
      add("path", { d: `M${left} ${bottom}${steps.join("")}V${bottom}Z`, style: `fill: ${css(colorOf(layer))}` });
    }
    for (const share of [0, 0.5, 1]) {
      add("path", { class: "axis", d: `M${left} ${y(share)}H${right}` });
      add("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`);
    }
    const last = settings.length - 1;
    for (const distance of new Set([0, Math.floor(last / 2), last])) {
      const anchor = distance === 0 ? "start" : distance === last ? "end" : "middle";
      add("text", { x: x(distance + 0.5), y: bottom + 18, "text-anchor": anchor }, String(distance));
    }
    const middle = (left + right) / 2;
    add("text", { x: middle, y: bottom + 38, "text-anchor": "middle" }, "distance of query and key, in positions");
    svg.replaceChildren(...parts);
  }

  function table() {
    const { settings, byDistance } = shown;
    const length = settings.length;
    const all = settings.isCausal ? (length * (length + 1)) / 2 : length * length;
    const rows = byDistance.map((counts, layer) => {
      const reached = counts.reduce((sum, count) => sum + count, 0);
      const farthest = counts.findLastIndex((count) => count > 0);
      const row = document.createElement("tr");
      const cells = [`${((100 * reached) / all).toFixed(2)} %`, (reached / length).toFixed(1), String(farthest)];
      const name = document.createElement("th");
      name.scope = "row";
      name.textContent = String(layer);
      row.append(name, ...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
      return row;
    });
    byId("layers-table").tBodies[0].replaceChildren(...rows);
  }

  // Mark the chosen pair in both pictures, and say what is known of it.
  function point() {
    const { settings, countsOfHeads, first } = shown;
    const [length, place] = [settings.length, pair.query * settings.length + pair.key];
    for (const cursor of document.querySelectorAll("#pattern-page .cursor")) {
      const part = (index) => `${(100 * index) / length}%`;
      Object.assign(cursor.style, { left: part(pair.key), top: part(pair.query), width: part(1), height: part(1) });
    }
    const count = countsOfHeads[Number(byId("head").value)][place];
    const layer = first[place];
    const sees = `head ${byId("head").value} ${count === 0 ? "does not see it" : count === 1 ? "sees it" : `counts it ${count} times`}`;
    const reach =
      layer === 0 ? "it is the query's own position"
      : layer < 0 ? `out of reach of ${settings.layers} ${settings.layers === 1 ? "layer" : "layers"}`
      : `the query depends on it after ${layer} ${layer === 1 ? "layer" : "layers"}`;
    byId("pair").textContent = `Query ${pair.query}, key ${pair.key}: ${sees}; ${reach}.`;
  }

  function move(query, key) {
    if (shown === null) return;
    const last = shown.settings.length - 1;
    const within = (index) => Math.min(Math.max(index, 0), last);
    pair = { query: within(query), key: within(key) };
    point();
  }

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  for (const grid of document.querySelectorAll("#pattern-page .grid")) {
    const pointAt = (event) => {
      const place = grid.querySelector("canvas").getBoundingClientRect();
      const index = (at, start, size) => Math.floor(((at - start) / size) * shown.settings.length);
      move(index(event.clientY, place.top, place.height), index(event.clientX, place.left, place.width));
    };
    grid.addEventListener("pointermove", pointAt);
    grid.addEventListener("pointerdown", pointAt);
    grid.addEventListener("keydown", (event) => {
      const step = STEPS[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const times = event.shiftKey ? 8 : 1;
      move(pair.query + times * step[0], pair.key + times * step[1]);
    });
  }

  byId("example").append(...Object.keys(EXAMPLES).map((name) => new Option(name, name)));
  byId("example").addEventListener("change", (event) => {
    fill(EXAMPLES[event.target.value]);
    update();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target.id !== "example") update();
  });
  byId("head").addEventListener("change", draw);
  addEventListener("resize", () => shown !== null && draw());
  // The site's switch between light and dark.
  new MutationObserver(() => shown !== null && draw()).observe(document.body, {
    attributeFilter: ["data-md-color-scheme"],
  });
  const recall = () => {
    fill(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
    update();
  };
  addEventListener("hashchange", recall);
  recall();
})();
