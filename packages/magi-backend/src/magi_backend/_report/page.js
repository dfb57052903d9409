// Search, sort, and keys. The page says the same without it: everything is in the document, and details open by a click.
"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const search = document.querySelector("#search");
const rank = document.querySelector("#rank");
const compilations = all(".compilation");
const rowOf = new Map(all("#index tbody tr").map((row) => [row.dataset.of, row]));
const texts = new Map();
let here = -1;

const textOf = (compilation) => {
  if (!texts.has(compilation)) texts.set(compilation, compilation.textContent.toLowerCase());
  return texts.get(compilation);
};

const shown = () => compilations.filter((compilation) => !compilation.hidden);

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const compilation of compilations) {
    const row = rowOf.get(compilation.id);
    const text = () => textOf(compilation) + (row ? row.textContent.toLowerCase() : "");
    const wanted = !rank || rank.value === "" || rank.value === compilation.dataset.process;
    compilation.hidden = !(wanted && (words.length === 0 || words.every((word) => text().includes(word))));
    if (row) row.hidden = compilation.hidden;
  }
  document.querySelector("#count").textContent = `${shown().length} of ${compilations.length}`;
}

function sort(header) {
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  const body = header.closest("table").tBodies[0];
  const value = (row) => {
    const text = row.cells[header.cellIndex].textContent;
    const time = /^([\d.]+) (ms|s)\b/.exec(text);
    return time ? String(Math.round(time[1] * (time[2] === "s" ? 1e4 : 10))) : text;
  };
  const compare = (a, b) => value(a).localeCompare(value(b), undefined, { numeric: true });
  all("th[aria-sort]", header.parentElement).forEach((other) => other.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  body.append(...[...body.rows].sort((a, b) => (ascending ? compare(a, b) : compare(b, a))));
}

function go(step) {
  const list = shown();
  if (list.length === 0) return;
  const now = list.indexOf(compilations[here]);
  const next = list[Math.min(Math.max(now + step, 0), list.length - 1)];
  here = compilations.indexOf(next);
  all(".here").forEach((one) => one.classList.remove("here"));
  next.classList.add("here");
  rowOf.get(next.id)?.classList.add("here");
  next.querySelector("summary").focus({ preventScroll: true });
  next.scrollIntoView({ block: "start" });
}

function openTarget() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (!target) return;
  for (let outer = target; outer; outer = outer.parentElement) if (outer.tagName === "DETAILS") outer.open = true;
  target.scrollIntoView();
}

const keys = {
  "/": () => search.focus(),
  j: () => go(1),
  k: () => go(-1),
  o: () => { if (here >= 0) compilations[here].open = !compilations[here].open; },
  e: () => { const open = !shown().every((one) => one.open); shown().forEach((one) => { one.open = open; }); },
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && search) { search.value = ""; filter(); search.blur(); return; }
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !search || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});
search?.addEventListener("input", filter);
rank?.addEventListener("change", filter);
all("th button").forEach((button) => button.addEventListener("click", () => sort(button.parentElement)));
addEventListener("hashchange", openTarget);
openTarget();
if (search) filter();
