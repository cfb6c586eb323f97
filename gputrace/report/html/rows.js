"use strict";
// Streams and host threads below the lanes: named boxes, search, selection and its launch. Their
// data are the `TraceParts.rows` of timeline.py.
const Rows = (() => {
  const letterPx = 6.6, unitPx = 18, leastPx = 1.5, mostDepth = 6, mostPx = 520;

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  // Absolute times, and how deep each slice is nested; an enclosing slice comes first.
  function load(row) {
    const count = row.start.length, start = new Float64Array(count), end = new Float64Array(count);
    const depth = new Uint8Array(count), open = [];
    row.height = 1;
    for (let at = 0, now = 0; at < count; at++) {
      now += row.start[at];
      start[at] = now; end[at] = now + row.length[at];
      while (open.length && open[open.length - 1] <= now) open.pop();
      depth[at] = Math.min(open.length, mostDepth - 1);
      row.height = Math.max(row.height, depth[at] + 1);
      open.push(end[at]);
    }
    return Object.assign(row, { start, end, depth });
  }

  function hatch(context, left, right, height) {
    context.save();
    context.beginPath();
    context.rect(left, 0, right - left, height);
    context.clip();
    context.beginPath();
    for (let x = left - left % 12 - height; x < right; x += 12) { context.moveTo(x, height); context.lineTo(x + height, 0); }
    context.strokeStyle = "#5a5a66";
    context.stroke();
    context.restore();
  }

  async function setUp(found, board, facts, show, onto) {
    const plot = found.get_model_by_name("rows"), source = name => found.get_model_by_name(`rows-${name}`);
    let packed = await unpack(facts.rows), rows = [], groups = [], calls = new Map();
    let drawn = [], selected = null, hits = new Set(), list = [], busy = false;
    group();
    const first = groups.filter(group => group.lane === facts.first_lane);
    const threads = first.filter(one => one.name !== "streams").slice(0, 2);
    for (const group of [...first.filter(one => one.name === "streams"), ...threads]) group.open = true;

    function group() {
      const before = groups;
      [rows, groups, calls] = [packed.rows.map(load), [], new Map()];
      const same = row => one => one.lane === row.lane && one.name === row.group && one.process === row.process;
      for (const row of rows) {
        let group = groups.find(same(row));
        if (!group) groups.push(group = { lane: row.lane, name: row.group, process: row.process, rows: [], open: Boolean((before.find(same(row)) || {}).open) });
        group.rows.push(row);
        row.group = group;
        if (row.track >= 0 && facts.tracks[row.track].name === "CUDA calls")
          row.link.forEach((link, slice) => link > 0 && calls.set(`${row.process}:${link}`, [row, slice]));
      }
    }

    // A server sends what it reads of a window in place of what the page has.
    const served = plot.tags[0];
    served.properties.data.change.connect(async () => {
      const chosen = selected && { at: selected[0].start[selected[1]], name: nameOf(...selected), row: selected[0] };
      packed = await unpack(served.data.text[0]);
      group();
      hang();
      const again = chosen && rows.find(row => row.lane === chosen.row.lane && row.label === chosen.row.label && row.group.name === chosen.row.group.name);
      const slice = again ? again.start.findIndex((start, at) => start === chosen.at && nameOf(again, at) === chosen.name) : -1;
      selected = slice < 0 ? null : [again, slice];
      search();
    });

    const launchOf = (row, at) => row.track < 0 && row.link[at] > 0 ? calls.get(`${row.process}:${row.link[at]}`) : undefined;
    const stepAt = moment => {
      const { left, right, number } = board.steps.data;
      const at = left.findIndex((from, one) => number[one] >= 0 && from * 1e9 <= moment && moment < right[one] * 1e9);
      return at < 0 ? "none" : String(number[at]);
    };
    const unnamed = (row, at) => row.track < 0 ? facts.classes[row.kind[at]].label : row.label;
    const nameOf = (row, at) => packed.names[row.name[at]] || unnamed(row, at);
    const placeOf = row => `${facts.lanes[row.lane]}, ${row.group.name === "streams" ? "" : row.group.name + ", "}${row.label}`;
    const colorOf = (row, at) => row.track < 0 ? facts.classes[row.kind[at]].color : facts.tracks[row.track].color;

    function launchText(row, at) {
      const call = launchOf(row, at);
      if (!call) return row.track < 0 ? "unknown" : "";
      const [of, slice] = call;
      return `${packed.names[of.name[slice]]} by ${of.group.name}, ${Lanes.told(row.start[at] - of.start[slice])} earlier`;
    }

    // The rows that are open, from the top down: [row, its lowest edge].
    function arrange() {
      let height = 0;
      for (const group of groups) if (group.open) height += 1 + group.rows.reduce((sum, row) => sum + row.height, 0);
      const places = new Map(), heads = [];
      let top = height;
      for (const group of groups) {
        if (!group.open) continue;
        heads.push([group, --top]);
        for (const row of group.rows) places.set(row, top -= row.height);
      }
      return { height, places, heads };
    }

    // The boxes of a row in a window. Those too narrow to tell apart are one, which looks `like` the
    // sort of operation that has most of its time.
    function boxes(row, from, to, scale) {
      const found = [], last = Array(row.height).fill(null);
      for (let at = 0; at < row.start.length && row.start[at] < to; at++) {
        if (row.end[at] <= from && row.end[at] !== row.start[at]) continue;
        const left = row.start[at], right = Math.max(row.end[at], left + scale * leastPx / 2), before = last[row.depth[at]];
        const of = row.count.length ? row.count[at] : 1, narrow = right - left < leastPx * scale, hit = hits.has(row.name[at]);
        if (before && narrow && before.narrow && left - before.right < scale) {
          const sort = one => row.track < 0 ? row.kind[one] : 0, spent = before.spent ||= { [sort(before.at)]: row.end[before.at] - before.left };
          spent[sort(at)] = (spent[sort(at)] || 0) + row.end[at] - left;
          if (spent[sort(at)] > spent[sort(before.like)]) before.like = at;
          before.right = Math.max(before.right, right);
          before.count += of;
          before.hit ||= hit;
          continue;
        }
        found.push(last[row.depth[at]] = { row, at, like: at, left, right, count: 1, narrow, hit });
      }
      return found;
    }

    // The parts of a window of which the page has no names.
    function absent(from, to) {
      const parts = [];
      let at = from;
      for (const [start, end] of packed.within || [[from, to]]) {
        if (Math.min(start, to) > at) parts.push([at, Math.min(start, to)]);
        at = Math.max(at, end);
      }
      if (at < to) parts.push([at, to]);
      return parts;
    }

    // How much of the trace the page has names of.
    function extent() {
      const { left, right, number } = board.steps.data, steps = [...number.keys()].filter(at => number[at] >= 0);
      const has = steps.filter(at => packed.within.some(([start, end]) => start <= left[at] * 1e9 + 1 && right[at] * 1e9 - 1 <= end));
      const spent = packed.within.reduce((sum, [start, end]) => sum + end - start, 0);
      return steps.length ? `${has.length} of ${steps.length} steps` : Lanes.told(spent);
    }

    function draw(from, to, px) {
      const { height, places, heads } = arrange(), scale = (to - from) / px;
      const out = { left: [], right: [], bottom: [], top: [], color: [], name: [], row: [], length: [], step: [], launch: [] };
      const marked = { left: [], right: [], bottom: [], top: [] }, words = { x: [], y: [], text: [], color: [] };
      const put = (x, y, text, color) => { words.x.push(x / 1e9); words.y.push(y); words.text.push(text); words.color.push(color); };
      const labels = {}, ticks = [];
      drawn = [];
      for (const [group, bottom] of heads)
        put(from, bottom + 0.5, `${facts.lanes[group.lane]}: ${group.name}`, "#c8c8d0");
      for (const [row, lowest] of places) {
        const middle = lowest + row.height - 0.5;
        ticks.push(middle); labels[middle] = board.short(row.label);
        for (const box of boxes(row, from, to, scale)) {
          const bottom = lowest + row.height - 1 - row.depth[box.at] + 0.06;
          drawn.push(box);
          out.left.push(box.left / 1e9); out.right.push(box.right / 1e9);
          out.bottom.push(bottom); out.top.push(bottom + 0.88); out.color.push(colorOf(row, box.like));
        }
      }
      drawn.forEach(({ row, at, like, count, hit }, box) => {
        out.name.push(count > 1 ? `${count} of them, mostly ${unnamed(row, like)}: zoom in` : nameOf(row, at));
        out.row.push(placeOf(row));
        out.length.push(Lanes.told(count > 1 ? (out.right[box] - out.left[box]) * 1e9 : row.end[at] - row.start[at]));
        out.step.push(stepAt(row.start[at]));
        out.launch.push(count > 1 ? "" : launchText(row, at));
        if (hit) for (const side of ["left", "right", "bottom", "top"]) marked[side].push(out[side][box]);
        const low = Math.max(out.left[box] * 1e9, from), room = (Math.min(out.right[box] * 1e9, to) - low) / scale - 6;
        const most = Math.floor(room / letterPx), text = count > 1 ? "" : packed.short[row.name[at]] || unnamed(row, at);
        if (most >= 4 && text) put(low, out.bottom[box] + 0.42, text.length <= most ? text : text.slice(0, most - 1) + "…", onto(out.color[box]));
      });
      busy = true;
      const tall = Math.max(height, 1);
      if (plot.y_range.end !== tall) {
        plot.y_range.setv({ start: 0, end: tall });
        plot.height = tall * unitPx + 8;
        document.getElementById("rows").style.maxHeight = `${mostPx}px`;
      }
      plot.left[0].major_label_overrides = new Map(Object.entries(labels).map(([at, text]) => [Number(at), text]));
      plot.left[0].ticker.ticks = ticks;
      source("boxes").data = out; source("hits").data = marked; source("words").data = words;
      source("boxes").selected.indices = [];
      busy = false;
      drawChosen(places);
      const parts = absent(from, to);
      source("absent").data = {
        left: parts.map(([start]) => start / 1e9), right: parts.map(([, end]) => end / 1e9), bottom: parts.map(() => 0), top: parts.map(() => tall),
      };
      document.getElementById("named").textContent = parts.length
        ? served.data.text.length ? "Hatched: still being read." : `Hatched: not in this file, which has the names of ${extent()}; gputrace browse and report --serve have all.` : "";
    }

    // The same boxes onto a canvas, while they move.
    function paint({ context, width, height }, from, to) {
      const { height: tall, places, heads } = arrange(), scale = (to - from) / width, unit = height / Math.max(tall, 1), words = [];
      context.fillStyle = facts.ground;
      context.fillRect(0, 0, width, height);
      for (const [group, bottom] of heads) words.push([3, height - (bottom + 0.5) * unit, `${facts.lanes[group.lane]}: ${group.name}`, "#c8c8d0"]);
      for (const [row, lowest] of places) {
        for (const box of boxes(row, from, to, scale)) {
          const left = Math.max((box.left - from) / scale, 0), room = Math.max(Math.min((box.right - from) / scale, width) - left, leastPx / 2);
          const top = height - (lowest + row.height - row.depth[box.at]) * unit, color = colorOf(row, box.like);
          context.fillStyle = color;
          context.fillRect(left, top, room > 2 * leastPx ? room - 0.6 : room, 0.88 * unit);
          const most = Math.floor((room - 6) / letterPx), text = most >= 4 && box.count === 1 ? packed.short[row.name[box.at]] || unnamed(row, box.at) : "";
          if (text) words.push([left + 3, top + unit / 2, text.length <= most ? text : text.slice(0, most - 1) + "…", onto(color)]);
        }
      }
      for (const [start, end] of absent(from, to)) hatch(context, (start - from) / scale, (end - from) / scale, height);
      Object.assign(context, { font: "11px helvetica, sans-serif", textAlign: "left", textBaseline: "middle" });
      for (const [x, y, text, color] of words) { context.fillStyle = color; context.fillText(text, x, y); }
    }

    const bottomAt = (places, [row, at]) => places.get(row) + row.height - 1 - row.depth[at] + 0.06;

    function drawChosen(places) {
      const chosen = { left: [], right: [], bottom: [], top: [] }, arrow = { x: [], y: [], end_x: [], end_y: [] };
      const call = selected && launchOf(...selected);
      for (const [row, at] of [selected, call].filter(one => one && places.has(one[0]))) {
        const bottom = bottomAt(places, [row, at]);
        chosen.left.push(row.start[at] / 1e9); chosen.right.push(row.end[at] / 1e9);
        chosen.bottom.push(bottom); chosen.top.push(bottom + 0.88);
      }
      if (chosen.left.length === 2) {
        arrow.x.push(chosen.left[1]); arrow.y.push(chosen.bottom[1]);
        arrow.end_x.push(chosen.left[0]); arrow.end_y.push(chosen.bottom[0]);
        if (arrow.y[0] < arrow.end_y[0]) { arrow.y[0] += 0.88; } else { arrow.end_y[0] += 0.88; }
      }
      source("chosen").data = chosen; source("arrow").data = arrow;
    }

    function select(row, at, move) {
      selected = [row, at];
      if (move) {
        row.group.open = true;
        buttons();
        const width = (board.range.end - board.range.start) * 1e9, length = row.end[at] - row.start[at];
        const shown = Math.max(length * 1.2, Math.min(width, length * 25));
        show((row.start[at] + row.end[at] - shown) / 2, (row.start[at] + row.end[at] + shown) / 2);
      }
      const call = launchOf(row, at), detail = document.getElementById("detail");
      detail.replaceChildren();
      const fields = [["name", nameOf(row, at)], ["on", placeOf(row)], ["length", Lanes.told(row.end[at] - row.start[at])],
        ["from", `${(row.start[at] / 1e9).toFixed(9)} s`], ["step", stepAt(row.start[at])], ["launch", launchText(row, at)]];
      for (const [term, text] of fields) {
        if (!text) continue;
        const name = document.createElement("dt"), value = document.createElement("dd");
        name.textContent = term; value.textContent = text;
        detail.append(name, value);
      }
      document.getElementById("to-selected").hidden = false;
      document.getElementById("to-launch").hidden = !call;
      board.later();
    }

    source("boxes").selected.properties.indices.change.connect(() => {
      const box = source("boxes").selected.indices[0];
      if (busy || box === undefined) return;
      const { row, at, count } = drawn[box];
      if (count > 1) show(source("boxes").data.left[box] * 1e9, source("boxes").data.right[box] * 1e9);
      else select(row, at, false);
    });
    const fit = ([row, at], others = []) => {
      const all = [[row, at], ...others], low = Math.min(...all.map(([of, one]) => of.start[one])), high = Math.max(...all.map(([of, one]) => of.end[one]));
      for (const [of] of all) of.group.open = true;
      buttons();
      show(low - (high - low) * 0.1, high + (high - low) * 0.1);
      board.later();
    };
    document.getElementById("to-selected").addEventListener("click", () => selected && fit(selected));
    document.getElementById("to-launch").addEventListener("click", () => {
      const call = selected && launchOf(...selected);
      if (call) fit(selected, [call]);
    });

    // A button opens and closes the rows of a GPU's streams, or of a thread.
    function buttons() {
      const open = groups.filter(group => group.open).length;
      document.getElementById("open").textContent = `Streams and threads: ${open} of ${groups.length} open`;
      groups.forEach(group => group.button.setAttribute("aria-pressed", String(group.open)));
    }
    function hang() {
      const box = document.getElementById("groups");
      box.replaceChildren();
      for (const group of groups) {
        group.button = document.createElement("button");
        group.button.type = "button";
        group.button.textContent = `${facts.lanes[group.lane]} ${group.name}`;
        group.button.addEventListener("click", () => { group.open = !group.open; buttons(); board.later(); });
        box.append(group.button);
      }
      buttons();
    }
    hang();

    const input = document.getElementById("search"), told = document.getElementById("hits");
    function search() {
      const text = input.value.trim().toLowerCase();
      hits = new Set(text ? packed.names.map((name, at) => name.toLowerCase().includes(text) ? at : -1).filter(at => at >= 0) : []);
      list = [];
      if (hits.size) for (const row of rows) row.name.forEach((name, at) => hits.has(name) && list.push([row, at]));
      list.sort(([a, i], [b, j]) => a.start[i] - b.start[j]);
      told.textContent = board.stepOf(text) >= 0 ? `Enter shows step ${text}` : text ? `${list.length.toLocaleString("en")} found` : "";
      board.hits(list.map(([row, at]) => [row.start[at], row.end[at]]));
      board.later();
    }
    function step(by) {
      if (board.toStep(input.value.trim()) || !list.length) return;
      const current = selected ? list.findIndex(([row, at]) => row === selected[0] && at === selected[1]) : -1;
      const middle = (board.range.start + board.range.end) / 2 * 1e9;
      const near = list.findIndex(([row, at]) => row.start[at] >= middle);
      const from = current >= 0 ? current + by : by > 0 ? (near < 0 ? 0 : near) : (near < 0 ? list.length : near) - 1;
      const next = (from + list.length) % list.length;
      select(...list[next], true);
      told.textContent = `${(next + 1).toLocaleString("en")} of ${list.length.toLocaleString("en")}`;
    }
    input.addEventListener("input", search);
    input.addEventListener("keydown", event => { if (event.key === "Enter") { event.preventDefault(); step(event.shiftKey ? -1 : 1); } });
    document.getElementById("hit-next").addEventListener("click", () => step(1));
    document.getElementById("hit-previous").addEventListener("click", () => step(-1));
    perfetto(rows, packed, facts);

    // Searches for a kernel and goes to its longest launch, in the measured steps if it has any there.
    function longest(name) {
      input.value = name;
      search();
      const [low, high] = board.strip.tags.map(at => at * 1e9);
      const measured = list.filter(([row, at]) => low <= row.start[at] && row.start[at] < high);
      const length = ([row, at]) => row.end[at] - row.start[at];
      const most = (measured.length ? measured : list).reduce((one, other) => length(other) > length(one) ? other : one, list[0]);
      if (most) select(...most, true);
    }
    // Of the address: the selected box, and what is searched for.
    const state = () => ({ sel: selected ? `box.${rows.indexOf(selected[0])}.${selected[1]}` : "", q: input.value.trim() });
    function restore({ sel, q }) {
      input.value = q;
      search();
      const [row, at] = (/^box\.(\d+)\.(\d+)$/.exec(sel) || []).slice(1).map(Number);
      if (rows[row] && at < rows[row].start.length) { rows[row].group.open = true; buttons(); select(rows[row], at, false); } else clear();
    }
    function clear() {
      selected = null;
      document.getElementById("detail").replaceChildren();
      for (const name of ["to-selected", "to-launch"]) document.getElementById(name).hidden = true;
      board.later();
    }
    return { draw, paint, longest, state, restore, fit: () => selected && (fit(selected), true), whole: !packed.within };
  }

  // The rows in the Trace Event Format, in microseconds.
  function traceEvents(rows, packed, facts) {
    const events = [];
    rows.forEach((row, track) => {
      const ids = { pid: row.lane + 1, tid: 10_000_000 + track };
      events.push({ ph: "M", name: "process_name", ...ids, args: { name: facts.lanes[row.lane] } });
      events.push({ ph: "M", name: "thread_name", ...ids, args: { name: `${row.group.name}: ${row.label}` } });
      for (let at = 0; at < row.start.length; at++) {
        const name = packed.names[row.name[at]] || (row.track < 0 ? facts.classes[row.kind[at]].label : row.label);
        events.push({ ph: "X", name, ts: row.start[at] / 1e3, dur: (row.end[at] - row.start[at]) / 1e3, ...ids, args: { correlation: row.link[at] } });
      }
    });
    return new TextEncoder().encode(JSON.stringify({ displayTimeUnit: "ns", traceEvents: events })).buffer;
  }

  // Nothing is asked for until a button is pressed; then the viewer is opened and handed the trace.
  function perfetto(rows, packed, facts) {
    const told = document.getElementById("sent");
    document.getElementById("save-perfetto").addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([traceEvents(rows, packed, facts)], { type: "application/json" }));
      link.download = `${document.title.replace(/^gputrace: /, "").replace(/[^\w.-]+/g, "_")}.perfetto.json`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    });
    document.getElementById("to-perfetto").addEventListener("click", () => {
      let address;
      try { address = new URL(document.getElementById("viewer").value); } catch { address = null; }
      if (!address || !["http:", "https:"].includes(address.protocol)) { told.textContent = "This is no address of a viewer."; return; }
      const viewer = window.open(address.href);
      if (!viewer) { told.textContent = "The browser did not let the viewer open."; return; }
      told.textContent = "Waiting for the viewer …";
      const asking = setInterval(() => viewer.postMessage("PING", address.origin), 100);
      const stop = text => { clearInterval(asking); clearTimeout(late); removeEventListener("message", answer); told.textContent = text; };
      const late = setTimeout(() => stop("No viewer answered there: is it running?"), 30_000);
      function answer(event) {
        if (event.source !== viewer || event.origin !== address.origin || event.data !== "PONG") return;
        stop("The viewer has the trace.");
        viewer.postMessage({ perfetto: { buffer: traceEvents(rows, packed, facts), title: document.title } }, address.origin);
      }
      addEventListener("message", answer);
    });
  }

  return { setUp };
})();
