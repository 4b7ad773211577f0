// Shows the values under the pointer, zooms charts, and reloads the page of a running run. The page is complete without
// it.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const RELOAD_SECONDS = 10;

function readable(value) {
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size > 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) < Math.abs(points[high][0] - x) ? points[low] : points[high];
}

function drawn(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

function clock(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  return first < 0 ? "0 s" : parts.slice(first, first + 2).map(([size, unit], n) =>
    `${Math.floor((n ? seconds % parts[first][0] : seconds) / size)} ${unit}`).join(" ");
}

// Round numbers between two values: about `count`; on a logarithmic axis 1, 2 and 5 times powers of ten.
function ticks(low, high, count, log = false) {
  const step = [1, 2, 5, 10].map((factor) => factor * 10 ** Math.floor(Math.log10((high - low) / count)))
    .find((size) => size * count >= high - low);
  const found = [];
  for (let n = Math.ceil(low / step); !log && n * step <= high; n += 1) found.push(Number((n * step).toPrecision(12)));
  for (let power = 10 ** Math.floor(Math.log10(low)); log && power <= high; power *= 10) {
    found.push(power, ...(high / low > 1e4 ? [] : [2 * power, 5 * power]));
  }
  const inside = found.filter((value) => low <= value && value <= high);
  return log && inside.length < 2 ? ticks(low, high, count) : inside;
}

function scaleOf(low, high, start, end, of = Number) {
  return (value) => start + (of(value) - of(low)) / (of(high) - of(low)) * (end - start);
}

// The lines of a view, without points outside of it. Without smoothing, raw lines stand for their running means.
function visible({ lines }, { low, high, log, smooth }) {
  return lines.filter((_, n) => smooth || !lines[n - 1]?.raw).map((line) => ({
    ...line,
    raw: line.raw && smooth,
    label: line.raw && !smooth ? lines[lines.indexOf(line) + 1].label : line.label,
    points: line.points.filter(([x]) => low <= x && x <= high).map(([x, y]) => [x, log && y <= 0 ? null : y]),
  }));
}

function known(points) {
  return points.filter(([, y]) => y !== null);
}

// Draw a view of a chart. Returns its scales.
function draw(svg, [left, right, floor, top], facts, view) {
  const parts = [], lines = visible(facts, view);
  const put = (name, attributes, text) => parts[parts.push(drawn(name, attributes, text)) - 1];
  const values = lines.flatMap(({ points }) => known(points).map(([, y]) => y));
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = [low - Math.abs(low) / 2, high + (Math.abs(high) / 2 || 1)];
  const x = scaleOf(view.low, view.high, left, right);
  const y = scaleOf(low, high, floor, top, view.log ? Math.log10 : Number);
  for (const value of ticks(low, high, (floor - top) / 50, view.log)) {
    put("path", { class: "grid", d: `M${left} ${y(value)}H${right}` });
    put("text", { class: "tick end", x: left - 8, y: y(value) + 4 }, readable(value));
  }
  put("path", { class: "axis", d: `M${left} ${floor}H${right}` });
  for (const value of ticks(view.low, view.high, Math.max(2, (right - left) / 70))) {
    put("path", { class: "axis", d: `M${x(value)} ${floor}v4` });
    put("text", { class: "tick mid", x: x(value), y: floor + 17 }, facts.seconds ? clock(value) : readable(value));
  }
  for (const [at, text, style] of facts.marks.filter(([at]) => view.low <= at && at <= view.high)) {
    put("path", { class: `mark ${style}`, d: `M${x(at)} ${style === "checkpoint" ? floor - 6 : top}V${floor}` })
      .append(drawn("title", {}, text));
  }
  for (const { style, raw, points } of lines) {
    const move = (n) => (n && points[n - 1][1] !== null ? "L" : "M");
    const path = points.map(([at, value], n) => (value === null ? "" : `${move(n)}${x(at)} ${y(value)}h0`));
    put("path", { class: `line ${style}${raw ? " raw" : ""}`, d: path.join("") });
  }
  const ends = lines.filter(({ label, points }) => label && known(points).length)
    .map(({ label, style, points }) => ({ label, style, at: y(known(points).at(-1)[1]) + 4 }));
  let free = 0;
  for (const { label, style, at } of ends.sort((one, other) => one.at - other.at)) {
    put("text", { class: `label ${style}`, x: right + 8, y: Math.max(at, free) }, label);
    free = Math.max(at, free) + 14;
  }
  svg.replaceChildren(...parts);
  return [x, y];
}

// Show the values under the pointer, and call zoom() with the ends of a drag. Returns a function that draws the view.
function follow(figure, svg, facts, view, zoom) {
  const output = figure.querySelector(".readout"), original = [...svg.childNodes], layer = drawn("g", {});
  const edges = svg.dataset.edges.split(" ").map(Number), [left, right, floor, top] = edges;
  let x, y, pressed = null;

  const pointed = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return [view.low + (at.x - left) / (right - left) * (view.high - view.low), at.y];
  };
  svg.addEventListener("pointermove", (event) => {
    const [at, height] = pointed(event);
    const lines = visible(facts, view).map((line) => ({ ...line, points: known(line.points) }));
    const found = lines.filter(({ raw, points }) => !raw && points.length)
      .map((line) => ({ line, point: nearest(line.points, at) }));
    if (!found.length) return;
    const step = found[0].point[0], away = ({ point }) => Math.abs(y(point[1]) - height);
    if (found.length > 4) found.sort((one, other) => away(one) - away(other));
    layer.replaceChildren(drawn("path", { class: "pointer", d: `M${x(step)} ${floor}V${top}` }));
    const selection = pressed === null ? "" : `M${x(pressed)} ${floor}V${top}H${x(at)}V${floor}Z`;
    layer.append(drawn("path", { class: "selection", d: selection }));
    const where = facts.seconds ? clock : (value) => readable(Math.round(value));
    output.replaceChildren(facts.seconds ? where(step) : `step ${where(step)}`);
    for (const { line, point } of found.slice(0, found.length > 4 ? 3 : 4)) {
      layer.append(drawn("circle", { class: `at ${line.style}`, r: 4, cx: x(point[0]), cy: y(point[1]) }));
      const value = document.createElement("b");
      value.className = line.style;
      value.textContent = `${found.length > 1 ? line.name + " " : ""}${readable(point[1])}`;
      if (Math.abs(x(point[0]) - x(step)) > 2) value.textContent += ` at ${where(point[0])}`;
      output.append(value);
    }
  });
  svg.addEventListener("pointerleave", () => { pressed = null; layer.replaceChildren(); output.replaceChildren(); });
  if (facts.zoom) {
    svg.addEventListener("pointerdown", (event) => { [pressed] = pointed(event); });
    svg.addEventListener("pointerup", (event) => {
      const ends = [pressed, pointed(event)[0]].sort((one, other) => one - other);
      if (pressed !== null && x(ends[1]) - x(ends[0]) > 8) zoom(...ends);
      pressed = null;
    });
    svg.addEventListener("dblclick", () => zoom(...facts.x));
  }
  return (changed) => {
    if (!changed) svg.replaceChildren(...original);
    [x, y] = changed ? draw(svg, edges, facts, view)
      : [scaleOf(...facts.x, left, right), scaleOf(...facts.y, floor, top)];
    svg.append(layer);
  };
}

// Add a button that stays as it is when the page is reloaded.
function button(figure, name, pressed, press) {
  const title = figure.querySelector("b"), element = document.createElement("button");
  const key = `${title.textContent}: ${name}`;
  const set = (on) => { element.setAttribute("aria-pressed", on); press(on); };
  element.textContent = name;
  element.addEventListener("click", () => {
    set(element.getAttribute("aria-pressed") !== "true");
    sessionStorage.setItem(key, element.getAttribute("aria-pressed"));
  });
  set((sessionStorage.getItem(key) ?? String(pressed)) === "true");
  figure.querySelector("figcaption").insertBefore(element, figure.querySelector(".readout"));
}

function chart(figure) {
  const facts = JSON.parse(figure.querySelector("script").textContent);
  const view = { low: facts.x[0], high: facts.x[1], log: false, smooth: true };
  const update = (changes) => {
    const next = { ...view, ...changes };
    if (!visible(facts, next).some(({ points }) => known(points).length > 1)) return;  // no line to draw
    Object.assign(view, next);
    const zoomed = figure.classList.toggle("zoomed", view.low !== facts.x[0] || view.high !== facts.x[1]);
    redraws.forEach((redraw) => redraw(zoomed || view.log || !view.smooth));
  };
  const zoom = (low, high) => update({ low: Math.max(low, facts.x[0]), high: Math.min(high, facts.x[1]) });
  const redraws = [...figure.querySelectorAll("svg.lines")].map((svg) => follow(figure, svg, facts, view, zoom));
  redraws.forEach((redraw) => redraw(false));
  if (facts.buttons) button(figure, "log", false, (log) => update({ log }));
  const smooths = facts.lines.some(({ raw }) => raw);
  if (facts.buttons && smooths) button(figure, "smooth", true, (smooth) => update({ smooth }));
}

document.querySelectorAll("figure:has(svg.lines)").forEach(chart);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
if (document.body.dataset.live !== undefined) {
  setInterval(() => document.hidden || document.querySelector(".zoomed") || location.reload(), 1000 * RELOAD_SECONDS);
}
