// Shows the values under the pointer. The page is complete without it.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

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

function place([low, high, start, end], value) {
  return start + (value - low) / (high - low) * (end - start);
}

function drawn(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function clock(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  return first < 0 ? "0 s" : parts.slice(first, first + 2).map(([size, unit], n) =>
    `${Math.floor((n ? seconds % parts[first][0] : seconds) / size)} ${unit}`).join(" ");
}

function follow(svg) {
  const output = svg.closest("figure").querySelector(".readout");
  const { x, y, seconds, lines } = JSON.parse(svg.nextElementSibling.textContent);
  const shown = lines.filter((line) => line.points.length);
  const layer = svg.appendChild(drawn("g", {}));

  svg.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const pointed = x[0] + (at.x - x[2]) / (x[3] - x[2]) * (x[1] - x[0]);
    const found = shown.map((line) => ({ line, point: nearest(line.points, pointed) }));
    const step = found[0].point[0], away = ({ point }) => Math.abs(place(y, point[1]) - at.y);
    if (found.length > 4) found.sort((one, other) => away(one) - away(other));
    layer.replaceChildren(drawn("path", { class: "pointer", d: `M${place(x, step)} ${y[2]}V${y[3]}` }));
    const where = seconds ? clock : (value) => readable(Math.round(value));
    output.replaceChildren(seconds ? where(step) : `step ${where(step)}`);
    for (const { line, point } of found.slice(0, found.length > 4 ? 3 : 4)) {
      layer.append(drawn("circle", { class: `at ${line.style}`, r: 4, cx: place(x, point[0]), cy: place(y, point[1]) }));
      const value = document.createElement("b");
      value.className = line.style;
      value.textContent = `${shown.length > 1 ? line.name + " " : ""}${readable(point[1])}`;
      if (Math.abs(place(x, point[0]) - place(x, step)) > 2) value.textContent += ` at ${where(point[0])}`;
      output.append(value);
    }
  });
  svg.addEventListener("pointerleave", () => { layer.replaceChildren(); output.replaceChildren(); });
}

for (const svg of document.querySelectorAll("figure svg.lines")) follow(svg);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
