// The timeline: packed columns unpacked here, drawn on a canvas, moved by pointer, wheel, keys and links from rows.
const AXIS = 22;

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

class Timeline {
  constructor(canvas, data) {
    this.canvas = canvas; this.data = data; this.pen = canvas.getContext("2d");
    const n = data.dur.length;
    this.start = new Float64Array(n); this.end = new Float64Array(n); this.first = []; this.last = [];
    // Where a lane's events may overlap, its longest tells how far back a search must look.
    this.longest = data.lanes.map(() => 0);
    for (let i = 0, at = 0, lane = -1; i < n; i++) {
      if (data.lane[i] !== lane) { lane = data.lane[i]; at = 0; this.first[lane] = i; }
      at += data.step[i]; this.start[i] = at; this.end[i] = at + data.dur[i]; this.last[lane] = i + 1;
      this.longest[lane] = Math.max(this.longest[lane], data.dur[i]);
    }
    this.low = this.start.reduce((a, b) => Math.min(a, b), Infinity);
    this.high = this.end.reduce((a, b) => Math.max(a, b), -Infinity);
    this.view = [this.low, this.high]; this.chosen = -1; this.hover = -1;
    this.rows();
    this.theme();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.theme(); this.draw(); });
    new ResizeObserver(() => this.fit()).observe(canvas);
  }
  // A heading line for each rank, then its streams; a rank of one stream needs no more than its line.
  rows() {
    const lanes = this.data.lanes, streams = (label) => lanes.filter((lane) => lane.label === label).length;
    this.tall = lanes.length > 24 ? 17 : 22;
    this.tops = []; this.heads = []; this.names = [];
    let y = AXIS, rank;
    lanes.forEach((lane, i) => {
      const single = streams(lane.label) === 1;
      if (lane.label !== rank && !single) { this.heads.push([y, lane.label]); y += 18; }
      rank = lane.label;
      this.names[i] = single ? lane.label : `${labels.col_stream} ${lane.stream}`;
      this.tops[i] = y; y += this.tall;
    });
    this.height = y + 6;
    this.pen.font = "11px system-ui, sans-serif";
    this.margin = Math.max(60, ...this.names.map((name) => this.pen.measureText(name).width)) + 12;
  }
  theme() {
    const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(name).trim();
    this.ink = get("--ink"); this.dim = get("--ink-2"); this.rule = get("--rule-2"); this.paper = get("--paper"); this.inside = get("--inside");
    const named = { compute: "--compute", fused: "--fused", copy: "--copy", allreduce: "--ar", p2p: "--p2p", all_gather: "--ag", reduce_scatter: "--rs", all_to_all: "--a2a", graph: "--graph" };
    this.colours = (this.data.roles ?? []).map((role) => get(named[role] ?? "--other"));
    const waits = { wait_collective: "--coll", wait_upstream: "--up", wait_downstream: "--down" };
    this.hatches = (this.data.wait_states ?? []).map((state) => this.hatch(get(waits[state] ?? "--unres"), state));
  }
  hatch(colour, state) {
    const tile = make("canvas", { width: 8, height: 8 }), pen = tile.getContext("2d");
    pen.fillStyle = this.paper; pen.fillRect(0, 0, 8, 8); pen.globalAlpha = 0.25; pen.fillStyle = colour; pen.fillRect(0, 0, 8, 8); pen.globalAlpha = 1;
    pen.strokeStyle = colour; pen.lineWidth = 2.4; pen.beginPath();
    const lines = { wait_collective: [[0, 2, 8, 2], [0, 6, 8, 6]], wait_downstream: [[-2, -2, 10, 10], [-2, 6, 2, 10], [6, -2, 10, 2]] };
    for (const [x1, y1, x2, y2] of lines[state] ?? [[-2, 10, 10, -2], [-2, 2, 2, -2], [6, 10, 10, 6]]) { pen.moveTo(x1, y1); pen.lineTo(x2, y2); }
    pen.stroke();
    return this.pen.createPattern(tile, "repeat");
  }
  fit() {
    const ratio = devicePixelRatio || 1, width = this.canvas.clientWidth;
    if (!width) return;
    this.canvas.style.height = this.height + "px";
    this.canvas.width = width * ratio; this.canvas.height = this.height * ratio;
    this.ratio = ratio; this.width = width; this.left = Math.min(this.margin, width * 0.3);
    this.draw();
  }
  x(time) { return this.left + (this.width - this.left) * (time - this.view[0]) / (this.view[1] - this.view[0]); }
  time(x) { return this.view[0] + (this.view[1] - this.view[0]) * (x - this.left) / (this.width - this.left); }
  from(lane, time) {
    let low = this.first[lane], high = this.last[lane];
    const wanted = time - this.longest[lane];
    while (low < high) { const middle = (low + high) >> 1; if (this.start[middle] < wanted) low = middle + 1; else high = middle; }
    return low;
  }
  draw() {
    if (!this.width) return;
    const pen = this.pen;
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    this.axis(pen);
    for (const [y, label] of this.heads) { pen.fillStyle = this.ink; pen.font = "600 12px system-ui, sans-serif"; pen.fillText(label, 0, y + 10); }
    pen.font = "11px system-ui, sans-serif";
    this.names.forEach((_, i) => {
      pen.fillStyle = this.dim; pen.fillText(this.names[i], 0, this.tops[i] + this.tall / 2, this.left - 6);
    });
    pen.save(); pen.beginPath(); pen.rect(this.left, 0, this.width - this.left, this.height); pen.clip();
    this.data.lanes.forEach((_, lane) => this.lane(pen, lane));
    if (this.chosen >= 0) this.outline(pen, this.chosen);
    pen.restore();
    const span = (this.view[1] - this.view[0]) / 1e6, at = (this.view[0] - this.low) / 1e6;
    document.getElementById("tl-range").textContent = `${at.toFixed(3)} – ${(at + span).toFixed(3)} ms`;
  }
  axis(pen) {
    const span = this.view[1] - this.view[0], raw = span / (this.width < 500 ? 3 : 8), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw), zero = this.low;
    const [unit, name] = step >= 1e9 ? [1e9, "s"] : step >= 1e6 ? [1e6, "ms"] : step >= 1e3 ? [1e3, "µs"] : [1, "ns"];
    pen.textAlign = "center";
    for (let t = zero + Math.ceil((this.view[0] - zero) / step) * step; t <= this.view[1]; t += step) {
      const x = this.x(t);
      pen.strokeStyle = this.rule; pen.beginPath(); pen.moveTo(x, AXIS - 4); pen.lineTo(x, this.height); pen.stroke();
      pen.fillStyle = this.dim;
      if (x > this.left + 20) pen.fillText(`${Number(((t - zero) / unit).toPrecision(9)).toLocaleString("en")} ${name}`, Math.min(x, this.width - 26), 9);
    }
    pen.textAlign = "start";
  }
  lane(pen, lane) {
    const top = this.tops[lane] + 2, tall = this.tall - 4, data = this.data, stop = this.last[lane];
    let drawn = -1, last = -1;
    for (let i = this.from(lane, this.view[0]); i < stop && this.start[i] < this.view[1]; i++) {
      if (this.end[i] < this.view[0]) continue;
      const x = this.x(this.start[i]), right = this.x(this.end[i]), colour = data.role?.[i] ?? -1;
      // Many events in one pixel: the first of each colour stands for them.
      if (right < drawn && colour === last) continue;
      const w = Math.max(right - x - (right - x > 3 ? 0.5 : 0), 0.6);
      pen.fillStyle = this.colours[colour] ?? this.dim; pen.fillRect(x, top, w, tall);
      drawn = Math.max(x, Math.floor(right) + 0.5); last = colour;
      const wait = data.wait_ns?.[i] ?? -1;
      if (wait > 0 && data.wait_state[i] >= 0) {
        pen.fillStyle = this.hatches[data.wait_state[i]];
        pen.fillRect(x, top, Math.max(this.x(this.start[i] + wait) - x, 0.6), tall);
      }
      if (w > 46) this.label(pen, i, x, w, top, tall, wait);
    }
  }
  label(pen, i, x, w, top, tall, wait) {
    const from = wait > 0 ? Math.max(x, this.x(this.start[i] + wait)) : x, left = Math.max(from, this.left), room = Math.min(x + w, this.width) - left - 8;
    if (room < 38) return;
    const name = this.data.names[this.data.name[i]].replace(/^void /, ""), most = Math.floor(room / 6.2);
    pen.fillStyle = this.inside; pen.fillText(name.length > most ? name.slice(0, Math.max(most - 1, 1)) + "…" : name, left + 4, top + tall / 2 + 0.5);
  }
  outline(pen, i) {
    const y = this.tops[this.data.lane[i]] + 1, x = this.x(this.start[i]);
    pen.strokeStyle = this.ink; pen.lineWidth = 2; pen.strokeRect(x - 1, y, Math.max(this.x(this.end[i]) - x, 1) + 2, this.tall - 2); pen.lineWidth = 1;
  }
  find(x, y) {
    const lane = this.tops.findIndex((top) => y >= top && y < top + this.tall);
    if (lane < 0 || x < this.left) return -1;
    const time = this.time(x), near = (this.view[1] - this.view[0]) / (this.width - this.left) * 3;
    let best = -1, gap = near;
    for (let i = this.from(lane, time - near); i < this.last[lane] && this.start[i] <= time + near; i++) {
      const away = time < this.start[i] ? this.start[i] - time : time > this.end[i] ? time - this.end[i] : 0;
      if (away <= gap) { gap = away; best = i; }
    }
    return best;
  }
  say(i) {
    const d = this.data, ms = (ns) => (ns >= 1e6 ? (ns / 1e6).toFixed(3) + " ms" : (ns / 1e3).toFixed(1) + " µs");
    const lane = d.lanes[d.lane[i]], parts = [d.names[d.name[i]], `${lane.label}, ${labels.col_stream} ${lane.stream}`, ms(d.dur[i])];
    const role = d.roles?.[d.role[i]];
    if (role) parts.push(labels["role_" + role] ?? role);
    if ((d.forward?.[i] ?? -1) >= 0) parts.push(`${labels.col_forward} ${d.forward[i]}`);
    if ((d.layer?.[i] ?? -1) >= 0) parts.push(`${labels.col_layer} ${d.layer[i]}`);
    if ((d.communicator?.[i] ?? -1) >= 0) parts.push(d.communicators[d.communicator[i]] + ((d.seq?.[i] ?? -1) >= 0 ? ` #${d.seq[i]}` : ""));
    const wait = d.wait_ns?.[i] ?? -1, state = d.wait_states?.[d.wait_state?.[i]];
    if (wait >= 0 && state) parts.push(`${labels["state_" + state] ?? state}: ${ms(wait)}, ${labels.state_transfer}: ${ms(d.dur[i] - wait)}`);
    else if (state) parts.push(labels["state_" + state] ?? state);
    return parts.join(" · ");
  }
  set(low, high) {
    const least = 500, most = (this.high - this.low) * 1.02, span = Math.min(Math.max(high - low, least), most);
    const middle = (low + high) / 2, edge = (this.high - this.low) * 0.01;
    const from = Math.min(Math.max(middle - span / 2, this.low - edge), this.high + edge - span);
    this.view = [from, from + span]; this.draw();
  }
  zoom(factor, at = (this.view[0] + this.view[1]) / 2) { this.set(at - (at - this.view[0]) * factor, at + (this.view[1] - at) * factor); }
  pan(share) { const by = (this.view[1] - this.view[0]) * share; this.set(this.view[0] + by, this.view[1] + by); }
  reset() { this.set(this.low, this.high); }
  choose(i, move) {
    this.chosen = i;
    if (i < 0) { document.getElementById("tl-said").textContent = ""; this.draw(); return; }
    document.getElementById("tl-said").textContent = this.say(i);
    if (move) { const room = Math.max(this.data.dur[i] * 3, 150000); this.set(this.start[i] - room, this.end[i] + room); } else this.draw();
  }
  step(by) {
    const n = this.start.length;
    let i = this.chosen + by;
    if (this.chosen < 0) { i = this.start.findIndex((time) => time >= this.view[0]); if (i < 0) i = 0; }
    this.choose(Math.min(Math.max(i, 0), n - 1), true);
  }
  // Where a row of a table is: an event, the longest event of a kernel or communicator, or a whole forward.
  go(place) {
    if (place.event !== undefined) return this.choose(place.event, true);
    const d = this.data, number = { name: d.names?.indexOf(place.name), communicator: d.communicators?.indexOf(place.communicator), role: d.roles?.indexOf(place.role) };
    let best = -1, low = Infinity, high = -Infinity;
    for (let i = 0; i < this.start.length; i++) {
      if (place.rank !== undefined && d.lanes[d.lane[i]].rank !== place.rank) continue;
      if (place.forward !== undefined && d.forward?.[i] !== place.forward) continue;
      if (["name", "communicator", "role"].some((key) => place[key] !== undefined && d[key]?.[i] !== number[key])) continue;
      low = Math.min(low, this.start[i]); high = Math.max(high, this.end[i]);
      if (best < 0 || d.dur[i] > d.dur[best]) best = i;
    }
    if (best < 0) return false;
    if (place.name === undefined && place.communicator === undefined) { this.choose(-1); this.set(low, high); } else this.choose(best, true);
    return true;
  }
}

function controls(line, canvas) {
  const acts = { left: () => line.pan(-0.25), right: () => line.pan(0.25), in: () => line.zoom(0.5), out: () => line.zoom(2), reset: () => line.reset() };
  for (const button of all(".timeline [data-do]")) button.addEventListener("click", acts[button.dataset.do]);
  const keys = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", 0: "reset" };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (keys[event.key]) acts[keys[event.key]]();
    else if (event.key === "n") line.step(1);
    else if (event.key === "p") line.step(-1);
    else return;
    event.preventDefault();
  });
  document.getElementById("tl-forward").addEventListener("change", (event) => {
    if (event.target.value === "") line.reset(); else line.go({ forward: Number(event.target.value) });
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    if (event.shiftKey) line.pan(Math.sign(event.deltaY || event.deltaX) * 0.1);
    else line.zoom(event.deltaY < 0 ? 0.8 : 1.25, line.time(event.offsetX));
  }, { passive: false });
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => { grip = { x: event.clientX, view: [...line.view], moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (grip) {
      const by = (grip.x - event.clientX) / (line.width - line.left) * (grip.view[1] - grip.view[0]);
      if (Math.abs(grip.x - event.clientX) > 3) grip.moved = true;
      if (grip.moved) line.set(grip.view[0] + by, grip.view[1] + by);
      return;
    }
    const i = line.find(event.offsetX, event.offsetY);
    showTip(i < 0 ? "" : line.say(i), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (grip && !grip.moved) line.choose(line.find(event.offsetX, event.offsetY), false);
    grip = null;
  });
  canvas.addEventListener("pointerleave", () => showTip(""));
}

// Drawn, for not every font has a sign for it.
function crosshair() {
  const space = "http://www.w3.org/2000/svg", icon = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
  icon.setAttribute("viewBox", "0 0 12 12"); icon.setAttribute("aria-hidden", "true");
  path.setAttribute("d", "M6 0V12M0 6H12M6 2.6A3.4 3.4 0 1 1 5.99 2.6");
  icon.append(path);
  return icon;
}

function links(line) {
  for (const row of all("tr[data-goto]")) {
    const place = JSON.parse(row.dataset.goto);
    const button = make("button", { type: "button", className: "go" });
    button.append(crosshair());
    button.setAttribute("aria-label", `${labels.show}: ${row.cells[0].textContent.trim()}`);
    button.title = labels.show;
    button.addEventListener("click", () => {
      if (line.go(place) === false) { button.disabled = true; return; }
      line.canvas.scrollIntoView({ block: "center" });
      line.canvas.focus({ preventScroll: true });
    });
    row.cells[0].append(button);
  }
}

async function startTimeline() {
  const canvas = document.getElementById("tl");
  if (!canvas) return;
  const said = document.getElementById("tl-said");
  try {
    const line = new Timeline(canvas, await unpack(document.getElementById("tl-data").textContent));
    controls(line, canvas);
    links(line);
    said.textContent = "";
    globalThis.timeline = line;
  } catch (error) {
    said.textContent = "";
    document.getElementById("tl-failed").hidden = false;
    document.getElementById("tl-failed").append(` (${error.message})`);
  }
}
startTimeline();
