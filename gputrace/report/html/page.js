"use strict";
// Brings the page to life: the timeline, its keys and buttons, the list of gaps, the theme.
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const looks = facts.classes;
  const idle = new Set(looks.map((look, at) => [look, at]).filter(([look]) => look.label.startsWith("idle")).map(([, at]) => at));
  const rows = [...document.querySelectorAll("tr[data-start]")];
  const where = document.getElementById("where");
  const letterPx = 6.6;
  let board = null, chosen = -1;

  function ready(then) {
    const found = window.Bokeh && Bokeh.documents[0];
    if (found && found.roots().length) then(found); else setTimeout(() => ready(then), 20);
  }

  // One link for each section.
  function contents() {
    const links = [...document.querySelectorAll("main h2, #h-gaps")].map(head => {
      const link = document.createElement("a");
      link.href = `#${head.id}`;
      link.textContent = head.textContent;
      return link;
    });
    const nav = document.querySelector("nav");
    if (nav) nav.append(...links);
  }

  const units = { ns: 1, us: 1e3, "µs": 1e3, ms: 1e6, s: 1e9, min: 6e10, h: 3.6e12 };

  // What a cell is sorted by: a length, a number, or its text; null where it has nothing.
  function sortKey(text) {
    const number = /^[<≥+]?\s*(-?[\d,]*\.?\d+)\s*(ns|us|µs|ms|s|min|h)?\b/.exec(text);
    if (number) return Number(number[1].replaceAll(",", "")) * (units[number[2]] || 1);
    return /^[–?]?$/.test(text) ? null : text.toLowerCase();
  }

  // A click on a column's head sorts by it: the largest first, the smallest first, as it was.
  function sortable(table) {
    const body = table.tBodies[0], original = [...body.rows];
    const heads = [...table.querySelectorAll("thead th")];
    if (original.length < 3) return;
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.textContent = head.textContent || (column ? "share" : "name");
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const order = { descending: "ascending", ascending: null }[head.getAttribute("aria-sort")];
        const next = order === undefined ? "descending" : order;
        for (const other of heads) other.removeAttribute("aria-sort");
        const last = original.at(-1).cells[0].textContent.trim() === "total" ? [original.at(-1)] : [];
        const moved = original.filter(row => !last.includes(row));
        if (next) {
          head.setAttribute("aria-sort", next);
          const keys = new Map(moved.map(row => [row, sortKey((row.cells[column] || head).textContent.trim())]));
          const sign = next === "descending" ? -1 : 1;
          moved.sort((one, other) => {
            const [a, b] = [keys.get(one), keys.get(other)];
            if (a === null || b === null) return (a === null) - (b === null);
            return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
          });
        }
        body.append(...moved, ...last);
      });
    });
  }

  // Rows whose name has all of some words are shown, the others are not.
  function filtered(input) {
    const rows = [...input.closest("details").querySelectorAll("tbody tr")], told = input.closest("p").querySelector("output");
    const names = rows.map(row => (row.cells[0].title || row.cells[0].textContent).toLowerCase());
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/);
      rows.forEach((row, at) => { row.hidden = !words.every(word => names[at].includes(word)); });
      told.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length}`;
    });
  }

  // A tooltip that hangs over a chart would be printed.
  function hideTips(root, hide) {
    for (const one of root.querySelectorAll("*")) {
      if (one.classList.contains("bk-Tooltip") || one.classList.contains("bk-tooltip")) one.style.visibility = hide ? "hidden" : "";
      if (one.shadowRoot) hideTips(one.shadowRoot, hide);
    }
  }

  function open(found) {
    contents();
    document.querySelectorAll("table").forEach(sortable);
    document.querySelectorAll("[data-filter]").forEach(filtered);
    for (const button of document.querySelectorAll("[data-finding]"))
      button.addEventListener("click", () => choose(rows.findIndex(row => row.dataset.of === button.dataset.finding), true));
    theme(found);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => theme(found));
    // Charts are as wide on paper as they were drawn: they are not drawn again for it.
    const width = px => { document.body.style.width = px; };
    addEventListener("beforeprint", () => { width(`${document.body.offsetWidth}px`); theme(found, false); hideTips(document, true); });
    addEventListener("afterprint", () => { width(""); theme(found); hideTips(document, false); });
    const timeline = found.get_model_by_name("timeline");
    align(found);
    addEventListener("resize", () => align(found));
    if (timeline) setUp(found, timeline);
    setUpFolds(found);
    document.body.dataset.ready = "yes";
  }

  function setUp(found, timeline) {
    const source = name => found.get_model_by_name(name);
    board = {
      range: timeline.x_range, count: facts.lanes.length,
      steps: timeline.tags.find(tag => tag.name === "step-list"),
      sources: facts.lanes.map((_, at) => timeline.tags.find(tag => tag.name === `lane-${at}`)),
      detail: name => source(`timeline-${name}`), overview: source("overview-bars"), lanes: [], overviewHits: source("overview-hits"), coarse: 1, moving: false, opening: Boolean(location.hash),
    };
    board.sources.forEach((one, at) => one.properties.data.change.connect(() => { load(at); later(); }));
    board.sources.forEach((_, at) => load(at));
    board.strip = found.get_model_by_name("overview").x_range;
    drawStrip();
    legend();
    for (const end of ["start", "end"]) board.range.properties[end].change.connect(later);
    rows.forEach((row, at) => row.addEventListener("click", () => choose(at, true)));
    for (const button of document.querySelectorAll("button[data-do]"))
      button.addEventListener("click", () => act(button.dataset.do, show));
    document.querySelector("[data-do=link]").hidden = location.protocol === "about:";
    for (const link of document.querySelectorAll("a[href^='#t=']")) link.addEventListener("click", toLanes);
    document.addEventListener("keydown", key);
    addEventListener("resize", later);
    board.first = [board.range.start * 1e9, board.range.end * 1e9];
    Object.assign(board, { toStep, stepOf, fold: yes => fold(found, yes), later, hits: markHits, short: text => text.length > labelSize() ? text.slice(0, labelSize() - 1) + "…" : text });
    draw();
    addEventListener("popstate", recall);
    chooseSteps(found);
    board.glide = Moving.setUp(found, board, facts, { now: visible, show: put, describe, tell });
    if (location.hash) recall();
    if (facts.rows) Rows.setUp(found, board, facts, show, onto).then(rows => { board.rows = rows; if (location.hash) recall(); draw(); nameKernels(); document.body.dataset.rows = "yes"; });
  }

  // A click on a kernel's name goes to its longest launch.
  function nameKernels() {
    for (const cell of document.querySelectorAll(":is(#kernels, .kernels) tbody th[title]")) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "named";
      button.append(...cell.childNodes);
      button.addEventListener("click", () => { board.rows.longest(cell.title.slice(0, 250)); toLanes(); });
      cell.append(button);
    }
    const all = document.getElementById("all-kernels");
    if (all) all.textContent = board.rows.whole
      ? "A click on a name shows its longest launch; the search (/) finds every launch."
      : "This file holds some steps in detail; gputrace browse has all.";
  }

  const toLanes = () => document.getElementById("lanes").scrollIntoView({ block: "start" });

  function load(at) {
    board.lanes[at] = Lanes.lane(board.sources[at], facts.start);
  }

  // One drawing a frame, whatever moved meanwhile: of wider columns while frames come late, and in
  // full once nothing has moved for a while.
  function later() {
    clearTimeout(board.settling);
    if (!board.moving) Object.assign(board, { moving: true, last: Infinity, coarse: Math.max(1, board.coarse / 2) });
    if (board.waiting) return;
    board.waiting = true;
    requestAnimationFrame(now => {
      if (now - board.last > 20) board.coarse = Math.min(16, board.coarse * 2);
      board.last = now;
      board.waiting = false;
      draw();
      requestAnimationFrame(() => { if (!board.waiting) board.settling = setTimeout(settle, 150); });
    });
  }

  function settle() {
    board.moving = false;
    if (board.coarse > 1) draw();
    remember();
  }

  // Step or window, selection and search are in the address, so that a link opens here and Back goes
  // back.
  function remember() {
    // A notebook's cell has no address, and another may not have been followed yet.
    if (location.protocol === "about:" || board.opening) return;
    const how = board.recalled ? "replaceState" : "pushState";
    board.recalled = false;
    const [from, to] = visible(), parts = new URLSearchParams(), seconds = ns => Number((ns / 1e9).toFixed(9));
    const { sel, q } = board.rows ? board.rows.state() : { sel: "", q: "" };
    if (board.step && board.step.from === from && board.step.to === to) parts.set("step", board.step.number);
    else if (from !== board.first[0] || to !== board.first[1]) parts.set("t", `${seconds(from)}-${seconds(to)}`);
    if (sel || chosen >= 0) parts.set("sel", sel || `gap.${chosen}`);
    if (q) parts.set("q", q);
    const address = String(parts) ? `#${parts}` : location.pathname + location.search;
    if (address === location.hash || (address[0] !== "#" && !location.hash.includes("="))) return;
    history[how](null, "", address);
  }

  // A browser without access to the clipboard shows the link.
  async function copyLink() {
    remember();
    const elsewhere = location.protocol === "file:" ? " To share it, send the file too; the part after # works with any copy of it." : "";
    try {
      await navigator.clipboard.writeText(location.href);
      where.textContent = `Link copied.${elsewhere}`;
    } catch { prompt(`The link.${elsewhere}`, location.href); }
  }

  function recall() {
    const parts = new URLSearchParams(location.hash.slice(1)), [, from, to] = /^([\d.]+)-([\d.]+)$/.exec(parts.get("t")) || [];
    board.opening = facts.rows && !board.rows;
    if (location.hash && !location.hash.includes("=")) return;
    const sel = parts.get("sel") || "", gap = /^gap\.(\d+)$/.exec(sel);
    chosen = -1;
    board.detail("chosen").data = { left: [], right: [], bottom: [], top: [], color: [] };
    if (gap) choose(Number(gap[1]));
    board.recalled = true;
    if (board.rows) board.rows.restore({ sel, q: parts.get("q") || "" });
    const step = parts.get("step");
    if (step !== null && toStep(step)) return;
    if (step !== null) noStep(step);
    if (to !== undefined || !location.hash) show(...(to === undefined ? board.first : [from * 1e9, to * 1e9]));
    if (to !== undefined) toLanes();
  }

  // The place in the list of steps of a number, by ours or else the program's own count, or of
  // "slowest"; -1 if there is no such step.
  function stepOf(text) {
    const asked = text === "slowest" ? facts.slowest : /^\d+$/.test(text) ? Number(text) : NaN;
    const { number, named } = board.steps.data, at = [...number].indexOf(asked);
    return at < 0 ? [...named].indexOf(asked) : at;
  }

  // Shows a step and why it took as long as it did.
  function toStep(text) {
    const at = stepOf(text), { left, right, number: { [at]: number } } = board.steps.data;
    if (at < 0) return false;
    const [from, to] = [left[at] * 1e9, right[at] * 1e9];
    show(from - (to - from) * 0.05, to + (to - from) * 0.05);
    const [shownFrom, shownTo] = visible();
    board.step = { number, from: shownFrom, to: shownTo };
    document.getElementById("why").className = "";
    document.getElementById("why").textContent = facts.why[number]
      || `Step ${number} took ${Lanes.told(to - from)}: gputrace analyze TRACE --step ${number} says what it has more of than the median step.`;
    toLanes();
    return true;
  }

  function noStep(text) {
    const all = [...board.steps.data.number].filter(number => number >= 0), least = Math.min(...all), most = Math.max(...all);
    document.getElementById("why").className = "missing";
    document.getElementById("why").textContent = `There is no step ${text} here: ${all.length ? `the page has steps ${least} to ${most}` : "no steps were found"}.`;
    toLanes();
  }

  // A click on the chart of steps shows the longest step near it.
  function chooseSteps(found) {
    const plot = found.get_model_by_name("steps"), host = document.getElementById("steps");
    if (!plot) return;
    host.addEventListener("click", event => {
      const view = Bokeh.index.get(plot), { x, y, width, height } = view.frame.bbox, own = view.el.getBoundingClientRect();
      const [across, down] = [event.clientX - own.x - x, event.clientY - own.y - y], scale = (plot.x_range.end - plot.x_range.start) / width;
      if (across < 0 || across > width || down < 0 || down > height) return;
      const { left, right, number } = board.steps.data, middle = plot.x_range.start + across * scale, most = Math.max(0.5, 4 * scale);
      const near = [...number.keys()].filter(at => number[at] >= 0 && Math.abs(number[at] - middle) <= most);
      if (near.length) toStep(String(number[near.reduce((one, at) => right[at] - left[at] > right[one] - left[one] ? at : one)]));
    });
  }

  const narrow = () => innerWidth < 600;
  const labelSize = () => narrow() ? 9 : 16;

  function drawStrip() {
    board.overview.data = everything(Math.max(board.strip.start * 1e9, facts.start), Math.min(board.strip.end * 1e9, facts.end), 700);
  }

  // Charts first show the measured steps; unfolded, what was before and after them, too.
  const foldable = found => found.roots().map(plot => plot.x_range).filter(range => range.tags && range.tags.length === 4);
  let folded = true;

  function fold(found, yes) {
    folded = yes;
    for (const range of new Set(foldable(found))) {
      const [low, high, first, last] = range.tags;
      range.setv(yes ? { start: low, end: high } : { start: first, end: last });
    }
    for (const button of document.querySelectorAll("[data-fold]")) button.setAttribute("aria-pressed", String(!yes));
    if (board) drawStrip();
  }

  function setUpFolds(found) {
    const needed = foldable(found).some(({ tags: [low, high, first, last] }) => high - low < 0.97 * (last - first));
    for (const button of document.querySelectorAll("[data-fold]")) {
      button.hidden = !needed;
      button.addEventListener("click", () => fold(found, !folded));
    }
  }

  // The same border beside all drawings of the timeline, so that times stand below each other.
  function align(found) {
    for (const name of ["overview", "timeline", "rows"]) {
      const plot = found.get_model_by_name(name);
      if (plot) plot.min_border_left = narrow() ? 66 : 112;
    }
  }

  function markHits(spans) {
    const out = { left: [], right: [], bottom: [], top: [] }, least = (facts.end - facts.start) / 700 / 1e9;
    for (const [start, end] of spans) {
      const last = out.left.length - 1;
      if (last >= 0 && start / 1e9 < out.right[last]) { out.right[last] = Math.max(out.right[last], end / 1e9); continue; }
      out.left.push(start / 1e9); out.right.push(Math.max(end / 1e9, start / 1e9 + least));
      out.bottom.push(0); out.top.push(board.count * 0.2);
    }
    board.overviewHits.data = out;
  }

  const empty = () => ({ left: [], right: [], bottom: [], top: [], color: [], what: [], share: [] });
  const bottomOf = lane => board.count - lane - 1 + 0.02;

  function everything(from, to, columns) {
    const out = empty();
    board.lanes.forEach((own, at) => Lanes.bars(own, from, to, columns, looks, bottomOf(at), out));
    return idleLast(out);
  }

  // The order of drawing: idle time on top, so that no edge of a neighbour covers a narrow gap.
  function idleLast(bars) {
    const isIdle = new Set([...idle].map(at => looks[at].color));
    const order = [...bars.left.keys()].sort((a, b) => isIdle.has(bars.color[a]) - isIdle.has(bars.color[b]));
    return Object.fromEntries(Object.entries(bars).map(([name, values]) => [name, order.map(at => values[at])]));
  }

  const visible = () => [Math.max(board.range.start * 1e9, facts.start), Math.min(board.range.end * 1e9, facts.end)];

  function tell(from, to) {
    where.textContent = `${(from / 1e9).toFixed(6)} s to ${(to / 1e9).toFixed(6)} s (${Lanes.told(to - from)})`;
  }

  // The steps in a window, and the words of steps and gaps.
  function describe(from, to, px) {
    const words = { x: [], y: [], text: [], color: [] };
    nameGaps(from, to, px, words);
    return { steps: listSteps(from, to, px, words), words };
  }

  function draw() {
    const [from, to] = visible();
    if (!(to > from)) return;
    const px = Math.max((document.getElementById("timeline").clientWidth || 1200) - (narrow() ? 96 : 142), 200);
    const columns = Math.round(px / (board.count > 8 ? 2 : 1.25) / (board.moving ? board.coarse : 1));
    board.detail("bars").data = everything(from, to, columns);
    const { steps, words } = describe(from, to, px);
    board.detail("steps").data = steps;
    board.detail("words").data = words;
    if (board.rows) board.rows.draw(from, to, px);
    tell(from, to);
    const coarse = Math.max(...board.lanes.map(own => Lanes.coarsest(own, from, to)));
    document.getElementById("reduced").textContent = coarse > (to - from) / px
      ? ` Here the page keeps the shares of ${Lanes.told(coarse)} at a time, not their order; the listed gaps are kept in full.` : "";
  }

  // Every gap that is wide enough says how long it is and why.
  function nameGaps(from, to, px, words) {
    const scale = (to - from) / px;
    board.lanes.forEach((own, at) => {
      for (const [start, end, which, longer] of Lanes.gaps(own, from, to, 44 * scale, idle)) {
        const left = Math.max(start, from), right = Math.min(end, to), room = (right - left) / scale;
        if (room <= 0) continue;
        const length = (longer ? "≥ " : "") + Lanes.told(end - start), cause = looks[which].label.slice(6);
        const text = [`${length} ${cause}`, length].find(one => one.length * letterPx <= room);
        if (text) word(words, (left + right) / 2, bottomOf(at) + Lanes.HEIGHT / 2, text, onto(looks[which].color));
      }
    });
  }

  function listSteps(from, to, px, words) {
    const { left, right, number, phase } = board.steps.data, out = empty(), scale = (to - from) / px;
    for (let at = 0; at < left.length; at++) {
      if (right[at] * 1e9 < from || left[at] * 1e9 > to) continue;
      out.left.push(left[at]); out.right.push(right[at]);
      out.bottom.push(board.count + 0.04); out.top.push(board.count + 0.46);
      out.color.push(facts.phases[phase[at]] || (number[at] % 2 ? "#4a4a55" : "#6a6a78"));
      const low = Math.max(left[at] * 1e9, from), high = Math.min(right[at] * 1e9, to);
      const told = phase[at] === "steady" ? "" : ` (${phase[at]})`;
      const text = (number[at] < 0 ? [phase[at]] : [`step ${number[at]}${told}`, `${number[at]}`])
        .find(one => one.length * letterPx <= (high - low) / scale);
      if (text) word(words, (low + high) / 2, board.count + 0.25, text, "#ffffff");
    }
    const { left: l, right: r, bottom, top, color } = out;
    return { left: l, right: r, bottom, top, color };
  }

  function word(words, at, height, text, color) {
    words.x.push(at / 1e9); words.y.push(height); words.text.push(text); words.color.push(color);
  }

  function onto(color) {
    const [red, green, blue] = [1, 3, 5].map(at => parseInt(color.slice(at, at + 2), 16));
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140 ? "#ffffff" : "#000000";
  }

  function legend() {
    const seen = new Set();
    for (const own of board.lanes) for (const kind of own.kind) seen.add(kind & Lanes.CLASS);
    for (const item of document.querySelectorAll("li[data-class]")) item.hidden = !seen.has(Number(item.dataset.class));
  }

  function show(from, to) {
    board.glide.stop();
    put(from, to);
  }

  // Lets the charts show a window.
  function put(from, to) {
    const width = Math.min(Math.max(to - from, facts.shortest), facts.end - facts.start);
    from = Math.min(Math.max(from, facts.start), facts.end - width);
    board.range.setv({ start: from / 1e9, end: (from + width) / 1e9 });
    if (folded && (from / 1e9 < board.strip.start - 1e-9 || (from + width) / 1e9 > board.strip.end + 1e-9)) board.fold(false);
  }

  function choose(at, scroll) {
    if (!rows.length) return;
    chosen = Math.min(Math.max(at, 0), rows.length - 1);
    rows.forEach((row, place) => place === chosen ? row.setAttribute("aria-current", "true") : row.removeAttribute("aria-current"));
    const row = rows[chosen], hidden = row.closest("details");
    if (hidden) hidden.open = true;
    const [lane, start, end] = ["lane", "start", "end"].map(name => Number(row.dataset[name]));
    show(start - Math.max((end - start) * 0.6, 1000), end + Math.max((end - start) * 0.6, 1000));
    board.detail("chosen").data = {
      left: [start / 1e9], right: [end / 1e9], bottom: [bottomOf(lane)], top: [bottomOf(lane) + Lanes.HEIGHT], color: ["#ffffff"],
    };
    const [length, why] = [row.querySelector("th"), row.querySelector("[data-label=cause]")].map(cell => cell && cell.textContent);
    document.getElementById("why").textContent = why ? `The gap of ${length}: ${why}` : "";
    if (scroll) toLanes();
  }

  function act(what, show) {
    const [from, to] = board.glide.view() || [board.range.start * 1e9, board.range.end * 1e9], width = to - from, middle = (from + to) / 2;
    const does = {
      run: () => show(facts.start, facts.end),
      measured: () => { board.fold(true); show(board.strip.start * 1e9, board.strip.end * 1e9); },
      in: () => show(middle - width / 4, middle + width / 4),
      out: () => show(middle - width, middle + width),
      left: () => show(from - width / 4, to - width / 4),
      right: () => show(from + width / 4, to + width / 4),
      previous: () => choose(chosen - 1), next: () => choose(chosen + 1),
      fit: () => (board.rows && board.rows.fit()) || choose(chosen), keys: () => document.getElementById("keys").showModal(), link: copyLink,
    };
    does[what]();
  }

  // Keys work wherever the focus is, but where one types, and arrows where they scroll a wide table.
  function key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, textarea, select")) return;
    if (event.key.startsWith("Arrow") && event.target.closest(".scroll")) return;
    if (event.key === "/" && facts.rows) { event.preventDefault(); document.getElementById("search").focus(); return; }
    const what = { "+": "in", "=": "in", "-": "out", w: "in", s: "out", ArrowLeft: "left", a: "left", ArrowRight: "right", d: "right", 0: "run", f: "fit", m: "measured", n: "next", p: "previous", c: "link", "?": "keys" }[event.key];
    if (!what) return;
    event.preventDefault();
    act(what, event.repeat ? board.glide.move : show);
    if (what === "keys" || what === "link") return;
    const { top, bottom } = document.getElementById("timeline").getBoundingClientRect();
    if (bottom < 0 || top > innerHeight) toLanes();
  }

  // Words and lines of the charts are drawn, so that no style sheet reaches them.
  function theme(found, dark = matchMedia("(prefers-color-scheme: dark)").matches) {
    const ink = dark ? "#d8d8e0" : "#2a2a32", line = dark ? "#8a8a96" : "#6a6a76";
    const colors = {
      major_label_text_color: ink, axis_label_text_color: ink, label_text_color: ink,
      axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null, grid_line_color: line,
    };
    for (const plot of found.roots())
      for (const model of [...plot.left, ...plot.right, ...plot.below, ...plot.above, ...plot.center])
        for (const [name, color] of Object.entries(colors))
          if (name in model.attributes) model.setv({ [name]: color });
  }

  ready(open);
})();
