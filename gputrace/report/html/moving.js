"use strict";
// Moves the timeline with the pointer: drawn onto canvases above the charts, which take several
// frames' time to draw; they follow once nothing has moved for a while.
const Moving = (() => {
  const settledMs = 150, leastPx = 8, cells = 1 << 17, axisPx = 22;
  const totals = new WeakMap();

  // Running totals of each class over equal cells of the whole run: any longer stretch of it holds
  // the difference of two.
  function totalsOf(own, count, start, end, classes) {
    if (!totals.has(own)) {
      const { sums } = Lanes.split(own, start, end, count, classes);
      const running = new Float64Array(sums.length + classes);
      for (let at = 0; at < sums.length; at++) running[at + classes] = running[at] + sums[at];
      totals.set(own, running);
    }
    return totals.get(own);
  }

  // Nanoseconds of each class in each column, as `Lanes.split`, at the same cost for any window.
  function split(own, from, to, columns, { start, end, classes, lanes }) {
    const count = Math.ceil(cells / lanes), cell = (end - start) / count, width = (to - from) / columns;
    if (width < cell) return Lanes.split(own, from, to, columns, classes).sums;
    const running = totalsOf(own, count, start, end, classes);
    const sums = new Float64Array(columns * classes), before = new Float64Array(classes);
    for (let column = -1; column < columns; column++) {
      const place = (from + (column + 1) * width - start) / cell, low = Math.min(count - 1, Math.floor(place)) * classes;
      for (let which = 0; which < classes; which++) {
        const one = running[low + which], next = running[low + classes + which];
        const now = one + (next - one) * (place - low / classes);
        if (column >= 0) sums[column * classes + which] = now - before[which];
        before[which] = now;
      }
    }
    return sums;
  }

  // The columns of one lane as pixels: its classes on top of each other, each as high as its share.
  function paint(sums, columns, width, colors, pixels, top, bottom) {
    const classes = colors.length;
    for (let column = 0; column < columns; column++) {
      let height = bottom, y = bottom;
      for (let which = 0; which < classes; which++) {
        const share = sums[column * classes + which] / width;
        if (share <= 0) continue;
        height -= share * (bottom - top);
        for (const stop = Math.round(height); y > stop; y--) pixels[(y - 1) * columns + column] = colors[which];
      }
    }
  }

  // As canvases have them: red in the lowest byte.
  const packed = color => {
    const [red, green, blue] = [1, 3, 5].map(at => parseInt(color.slice(at, at + 2), 16));
    return (0xff << 24 | blue << 16 | green << 8 | red) >>> 0;
  };

  // A canvas over the inner part of a chart, `more` pixels higher.
  function surface(plot, host, more) {
    const canvas = host.appendChild(document.createElement("canvas"));
    canvas.className = "moving";
    canvas.hidden = true;
    const inner = () => {
      const view = Bokeh.index.get(plot), { x, y, width, height } = view.frame.bbox;
      const outer = host.getBoundingClientRect(), own = view.el.getBoundingClientRect();
      return { x: x + own.x - outer.x, y: y + own.y - outer.y + host.scrollTop, width, height };
    };
    // Sized once a movement: that clears it, and lays the page out.
    function show() {
      const { x, y, width, height } = inner(), dense = devicePixelRatio;
      const first = host.scrollTop, seen = Math.min(height + more, host.clientHeight);
      Object.assign(canvas, { width: width * dense, height: seen * dense, hidden: false });
      Object.assign(canvas.style, { left: `${x}px`, top: `${Math.max(y, first)}px`, width: `${width}px`, height: `${seen}px` });
      const context = canvas.getContext("2d", { alpha: false });
      context.setTransform(dense, 0, 0, dense, 0, -Math.max(first - y, 0) * dense);
      return { context, width, height, dense };
    }
    return { canvas, inner, show };
  }

  function drawAxis(context, from, to, width, top) {
    const style = getComputedStyle(document.body), rough = (to - from) / 12e9;
    const power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 5, 10].find(one => one * power >= rough);
    context.fillStyle = style.backgroundColor;
    context.fillRect(0, top, width, axisPx);
    Object.assign(context, { fillStyle: style.color, font: "11px helvetica, sans-serif", textAlign: "center", textBaseline: "top" });
    for (let at = Math.ceil(from / 1e9 / step); at * step * 1e9 <= to; at++) {
      const x = (at * step * 1e9 - from) / (to - from) * width;
      context.fillRect(x, top, 1, 5);
      if (x > 15 && x < width - 15) context.fillText((at * step).toFixed(Math.max(0, Math.ceil(-Math.log10(step)))), x, top + 7);
    }
  }

  // `now()` and `show(from, to)` get and set what the charts show; `describe` gives steps and words.
  function setUp(found, board, facts, { now, show, describe, tell }) {
    const [start, end] = [facts.start, facts.end], plot = found.get_model_by_name("timeline");
    const looks = facts.classes, size = { start, end, classes: looks.length, lanes: board.count };
    const ground = packed(facts.ground);
    const colors = Uint32Array.from(looks, look => packed(look.name === "unknown" ? facts.ground : look.color));
    const lanesHost = document.getElementById("timeline"), rowsHost = document.getElementById("rows");
    const surfaces = [surface(plot, lanesHost, axisPx)];
    if (rowsHost) surfaces.push(surface(found.get_model_by_name("rows"), rowsHost, 0));
    let view = null, areas = null, waiting = false, settling = 0, image = null;

    function drawLanes({ context, width, height, dense }, from, to) {
      const unit = height / (board.count + 0.5), y = value => height - value * unit;
      const [columns, tall] = [width, height].map(size => Math.round(size * dense));
      if (!image || image.width !== columns || image.height !== tall) image = new ImageData(columns, tall);
      const pixels = new Uint32Array(image.data.buffer);
      pixels.fill(ground);
      board.lanes.forEach((own, at) => {
        const bottom = board.count - at - 1 + 0.02, sums = split(own, from, to, columns, size);
        const edges = [bottom + Lanes.HEIGHT, bottom].map(value => Math.round(y(value) * dense));
        paint(sums, columns, (to - from) / columns, colors, pixels, ...edges);
      });
      context.putImageData(image, 0, 0);
      const { steps, words } = describe(from, to, width), x = seconds => (seconds * 1e9 - from) / (to - from) * width;
      steps.left.forEach((left, at) => {
        context.fillStyle = steps.color[at];
        context.globalAlpha = 0.35;
        context.fillRect(x(left), y(steps.top[at]), x(steps.right[at]) - x(left) - 1, y(steps.bottom[at]) - y(steps.top[at]));
        context.globalAlpha = 1;
      });
      Object.assign(context, { font: "bold 11px helvetica, sans-serif", textAlign: "center", textBaseline: "middle" });
      words.text.forEach((text, at) => { context.fillStyle = words.color[at]; context.fillText(text, x(words.x[at]), y(words.y[at])); });
      drawAxis(context, from, to, width, height);
    }

    function draw() {
      waiting = false;
      if (!view) return;
      const [from, to] = view;
      areas ||= surfaces.map(one => one.show());
      drawLanes(areas[0], from, to);
      if (areas[1] && board.rows) board.rows.paint(areas[1], from, to);
      tell(from, to);
    }

    function move(from, to) {
      const width = Math.min(Math.max(to - from, facts.shortest), end - start);
      from = Math.min(Math.max(from, start), end - width);
      view = [from, from + width];
      clearTimeout(settling);
      settling = setTimeout(settle, settledMs);
      if (!waiting) requestAnimationFrame(draw);
      waiting = true;
    }

    // The charts take over, and the canvases go once they have been drawn.
    function settle() {
      if (!view) return;
      const last = view;
      show(...last);
      requestAnimationFrame(() => requestAnimationFrame(() => view === last && stop()));
    }

    function stop() {
      clearTimeout(settling);
      view = areas = null;
      for (const one of surfaces) one.canvas.hidden = true;
    }

    surfaces.forEach(({ inner }, which) => {
      const host = [lanesHost, rowsHost][which];
      host.addEventListener("wheel", event => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        const [from, to] = view || now(), { x, width } = inner();
        const share = Math.min(Math.max((event.clientX - host.getBoundingClientRect().x - x) / width, 0), 1);
        const factor = Math.exp(Math.max(-1, Math.min(1, event.deltaY / 400))), middle = from + share * (to - from);
        move(middle - (middle - from) * factor, middle + (to - middle) * factor);
      }, { passive: false });
      // Two fingers: what is below each stays there.
      host.addEventListener("touchstart", event => {
        if (event.touches.length !== 2) return;
        const { x, width } = inner(), edge = host.getBoundingClientRect().x + x, [from, to] = view || now();
        const shares = touches => [...touches].map(one => (one.clientX - edge) / width).sort((a, b) => a - b);
        const held = shares(event.touches).map(share => from + share * (to - from)), over = new AbortController();
        host.addEventListener("touchmove", moved => {
          if (moved.touches.length !== 2) return;
          moved.preventDefault();
          const [low, high] = shares(moved.touches), length = (held[1] - held[0]) / Math.max(high - low, 0.02);
          move(held[0] - low * length, held[0] - low * length + length);
        }, { passive: false, signal: over.signal });
        for (const name of ["touchend", "touchcancel"]) host.addEventListener(name, () => over.abort(), { signal: over.signal });
      });
      host.addEventListener("pointerdown", event => {
        const { x, y, width, height } = inner(), box = host.getBoundingClientRect();
        const [left, top] = [event.clientX - box.x - x, event.clientY - box.y + host.scrollTop - y];
        if (event.button || !event.isPrimary || plot.toolbar.gestures.pan.active || left < 0 || left > width || top < 0 || top > height) return;
        const [from, to] = view || now(), scale = (to - from) / width, over = new AbortController(), chart = event.composedPath()[0];
        let dragged = false;
        addEventListener("pointermove", moved => {
          const by = moved.clientX - event.clientX;
          // The charts see that it is no click, and nothing else of it; their tooltips go.
          if (dragged) moved.stopPropagation();
          else if (dragged = Math.abs(by) > leastPx) requestAnimationFrame(() => chart.dispatchEvent(new PointerEvent("pointerout", { isPrimary: true })));
          if (dragged) move(from - by * scale, to - by * scale);
        }, { capture: true, signal: over.signal });
        for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => over.abort(), { capture: true, signal: over.signal });
      });
    });
    return { move, stop, view: () => view };
  }

  return { setUp };
})();
