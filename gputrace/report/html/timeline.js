"use strict";
// Draws runs (see analyzers/timeline_model/cells.py) into bars: exact shares of each class in every
// column of pixels, and the runs themselves where they are wide enough.
const Lanes = (() => {
  const IN_CELL = 0x40, BEGINS_CELL = 0x80, CLASS = 0x3f;
  const HEIGHT = 0.86;

  // A lane's runs with the moments (nanoseconds from the origin) between them.
  function lane(source, start) {
    const length = source.data.length, kind = source.data.kind;
    const edges = new Float64Array(length.length + 1);
    edges[0] = start;
    for (let at = 0; at < length.length; at++) edges[at + 1] = edges[at] + length[at];
    return { edges, kind };
  }

  // The run in which a moment lies.
  function find(edges, moment) {
    let low = 0, high = edges.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (edges[middle] <= moment) low = middle; else high = middle;
    }
    return low;
  }

  // The first run of the cell of a run, and the first run after the cell; a run may be its own.
  function cellOf(kind, at) {
    if (!(kind[at] & IN_CELL)) return [at, at + 1];
    let first = at, last = at + 1;
    while (first > 0 && !(kind[first] & BEGINS_CELL)) first--;
    while (last < kind.length && (kind[last] & IN_CELL) && !(kind[last] & BEGINS_CELL)) last++;
    return [first, last];
  }

  // Calls `each(first run, first run after, start, end)` for all cells and runs in a window.
  function walk(own, from, to, each) {
    let [at, next] = cellOf(own.kind, find(own.edges, from));
    while (at < own.kind.length && own.edges[at] < to) {
      each(at, next, own.edges[at], own.edges[next]);
      if (next >= own.kind.length) return;
      [at, next] = cellOf(own.kind, next);
    }
  }

  // Nanoseconds of each class in each column of a window: columns * classes numbers.
  function split(own, from, to, columns, classes) {
    const sums = new Float64Array(columns * classes), width = (to - from) / columns;
    walk(own, from, to, (first, next, start, end) => {
      const low = Math.max(0, Math.floor((start - from) / width));
      const high = Math.min(columns - 1, Math.floor((Math.min(end, to) - from) / width));
      for (let column = low; column <= high; column++) {
        const left = from + column * width;
        const inside = Math.min(end, left + width) - Math.max(start, left);
        if (inside <= 0) continue;
        const share = inside / (end - start);
        for (let run = first; run < next; run++) {
          const length = own.edges[run + 1] - own.edges[run];
          sums[column * classes + (own.kind[run] & CLASS)] += length * share;
        }
      }
    });
    return { sums, width };
  }

  // Bars of one lane, appended to the columns of `out`.
  function bars(own, from, to, columns, looks, bottom, out) {
    const count = find(own.edges, to) - find(own.edges, from);
    if (count <= columns / 2) return exact(own, from, to, looks, bottom, out);
    const classes = looks.length, { sums, width } = split(own, from, to, columns, classes);
    for (let column = 0; column < columns; column++)
      pile(sums, column * classes, width, from + column * width, from + (column + 1) * width, looks, bottom, out);
  }

  function exact(own, from, to, looks, bottom, out) {
    const sums = new Float64Array(looks.length);
    walk(own, from, to, (first, next, start, end) => {
      sums.fill(0);
      for (let run = first; run < next; run++)
        sums[own.kind[run] & CLASS] += own.edges[run + 1] - own.edges[run];
      pile(sums, 0, end - start, start, end, looks, bottom, out);
    });
  }

  // The classes of one stretch on top of each other, each as high as its share.
  function pile(sums, offset, whole, start, end, looks, bottom, out) {
    let height = bottom;
    for (let which = 0; which < looks.length; which++) {
      const share = sums[offset + which] / whole;
      if (share <= 0) continue;
      const top = height + share * HEIGHT, last = out.left.length - 1;
      if (looks[which].name === "unknown") { height = top; continue; }
      if (last >= 0 && share > 0.9999 && out.share[last] === "100%" && out.right[last] === start / 1e9
          && out.bottom[last] === bottom && out.what[last].startsWith(looks[which].label + ",")) {
        out.right[last] = end / 1e9;
        out.what[last] = `${looks[which].label}, ${told(Math.round((out.right[last] - out.left[last]) * 1e9))}`;
        continue;
      }
      out.left.push(start / 1e9); out.right.push(end / 1e9);
      out.bottom.push(height); out.top.push(top);
      out.color.push(looks[which].color);
      out.what.push(`${looks[which].label}, ${told(sums[offset + which])}`);
      out.share.push(share > 0.9999 ? "100%" : `${(100 * share).toPrecision(3)}%`);
      height = top;
    }
  }

  // Stretches of idle time, whole, the longest first: [start, end, the class with most of it,
  // whether it may be longer]. Beside a cell its end is not known.
  function dark(own, idle) {
    const inCell = run => run >= 0 && run < own.kind.length && (own.kind[run] & IN_CELL) !== 0;
    const found = [];
    for (let run = 0; run < own.kind.length;) {
      const first = run, most = new Map();
      for (; run < own.kind.length && idle.has(own.kind[run] & CLASS) && !inCell(run); run++) {
        const which = own.kind[run] & CLASS;
        most.set(which, (most.get(which) || 0) + own.edges[run + 1] - own.edges[run]);
      }
      if (run === first) { run++; continue; }
      found.push([own.edges[first], own.edges[run], [...most].reduce((a, b) => (b[1] > a[1] ? b : a))[0],
        inCell(first - 1) || inCell(run)]);
    }
    return found.sort((one, other) => other[1] - other[0] - (one[1] - one[0]));
  }

  // Those at least `least` long that reach into a window.
  function gaps(own, from, to, least, idle) {
    own.dark ||= dark(own, idle);
    const shorter = own.dark.findIndex(([start, end]) => end - start < least);
    return own.dark.slice(0, shorter < 0 ? undefined : shorter).filter(([start, end]) => end > from && start < to);
  }

  // The widest cell in a window of which only shares are known; 0 where there is none.
  function coarsest(own, from, to) {
    let widest = 0;
    walk(own, from, to, (first, next, start, end) => {
      if (next - first > 1) widest = Math.max(widest, end - start);
    });
    return widest;
  }

  function told(ns) {
    const size = Math.abs(ns);
    const [unit, scale] = size < 999.5 ? ["ns", 1] : size < 999.5e3 ? ["µs", 1e3] : size < 999.5e6 ? ["ms", 1e6] : ["s", 1e9];
    const value = ns / scale, digits = unit === "ns" ? 0 : Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2;
    return `${value.toFixed(digits)} ${unit}`;
  }

  return { lane, find, walk, split, bars, gaps, coarsest, told, CLASS, HEIGHT };
})();
