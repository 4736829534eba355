"use strict";
// Data lies in script elements, as gzipped JSON in base64, and is unpacked when it is first needed. Texts enter the
// document as text nodes alone; the only markup taken from data is a figure's, made by svg.py.

const CHUNK = 100;
const index = JSON.parse(document.getElementById("index").textContent);
const kept = new Map();

function unpack(id) {
  if (!kept.has(id)) {
    kept.set(id, (async () => {
      const bytes = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      return JSON.parse(await new Response(stream).text());
    })());
  }
  return kept.get(id);
}

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Missing values last, whichever way; numbers by value, texts with their numbers by value.
function compare(a, b, sign) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const x = Number(a), y = Number(b);
  if (!Number.isNaN(x) && !Number.isNaN(y)) return sign * (x - y);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

function short(text) {
  if (!/^-?\d+\.\d+(e[-+]?\d+)?$/.test(text)) return text;
  const value = Number(text);
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 ? String(Number(value.toPrecision(5))) : value.toPrecision(4);
}

function heading(label, title, onsort) {
  return make("th", { scope: "col", "aria-sort": "none", title },
    make("button", { type: "button", onclick: (event) => onsort(event.currentTarget.parentElement) }, label));
}

// The way a column is sorted after a click on its heading: up, then down, then up ...
function turn(cell) {
  const way = cell.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of cell.parentElement.children) {
    if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", other === cell ? way : "none");
  }
  return way === "ascending" ? 1 : -1;
}

function sortableInPlace(table) {
  [...table.tHead.rows[0].cells].forEach((cell, place) => {
    const sorted = heading(cell.textContent, cell.title || null, (head) => {
      const sign = turn(head), body = table.tBodies[0];
      const value = (row) => row.cells[place].dataset.value ?? row.cells[place].textContent.trim();
      body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b), sign)));
    });
    sorted.className = cell.className;
    cell.replaceWith(sorted);
  });
}

// "arm=FP32 seed=1 2 bits": name=value is that column's whole value, any other word is in some column.
function matcher(text, columns) {
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [name, value] = word.split(/=(.*)/s), place = columns.indexOf(name);
    return value !== undefined && place >= 0
      ? (cells) => cells[place].toLowerCase() === value
      : (cells) => cells.some((cell) => cell.toLowerCase().includes(word));
  });
  return (cells) => tests.every((test) => test(cells));
}

class Grid {
  constructor(host, set, table, open) {
    this.columns = table.columns;
    this.rows = table.cells.length ? table.cells[0].map((_, row) => table.cells.map((column) => column[row])) : [];
    this.chosen = new Set(index.shown.filter((name) => this.columns.includes(name)));
    for (const [place, name] of this.columns.entries()) {
      if (table.cells[place].every((cell) => cell === "")) this.chosen.delete(name);
    }
    this.numeric = table.cells.map((column) => column.every((cell) => cell === "" || !Number.isNaN(Number(cell))));
    Object.assign(this, { set, open, order: this.rows, shown: this.rows, at: 0 });
    this.build(host);
    this.head();
    this.refill();
  }

  build(host) {
    const id = `${this.set.id}-filter`;
    this.count = make("output", { class: "soft", "aria-live": "polite", for: id });
    this.table = make("table", { class: "runs" }, make("thead"), make("tbody"));
    this.more = make("button", { type: "button", onclick: () => this.fill() });
    const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": `runs of ${this.set.name}` };
    const filter = make("input", { type: "search", id, placeholder: "for example  arm=FP32 seed=1",
      oninput: (event) => this.filter(event.target.value) });
    host.replaceChildren(
      make("div", { class: "bar" }, make("label", { for: id }, "Filter"), filter, this.count),
      make("details", { class: "columns" }, make("summary", {}, "Columns"),
        make("fieldset", {}, make("legend", { class: "soft" }, "shown in the table"),
          this.columns.map((name) => this.choice(name)))),
      make("div", region, this.table), make("div", { class: "bar" }, this.more));
    this.table.tBodies[0].addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row && !String(getSelection())) this.open(this.columns, this.shown[row.dataset.place]);
    });
    new IntersectionObserver((seen) => seen.some((entry) => entry.isIntersecting) && this.at && this.fill(),
      { rootMargin: "200px" }).observe(this.more);
  }

  choice(name) {
    const onchange = (event) => {
      this.chosen[event.target.checked ? "add" : "delete"](name);
      this.head();
      this.refill();
    };
    const box = make("input", { type: "checkbox", checked: this.chosen.has(name), onchange });
    return make("label", { title: (index.columns.runs[name] || [])[1] }, box, ` ${name}`);
  }

  head() {
    this.places = [...this.columns.keys()].filter((place) => this.chosen.has(this.columns[place]));
    const cells = this.places.map((place) => {
      const name = this.columns[place], [unit, meaning] = index.columns.runs[name] || ["", ""];
      const cell = heading(unit ? `${name} (${unit})` : name, meaning, (head) => this.sort(place, turn(head)));
      if (this.numeric[place]) cell.className = "number";
      return cell;
    });
    this.table.tHead.replaceChildren(make("tr", {}, cells));
  }

  sort(place, sign) {
    this.order = [...this.order].sort((a, b) => compare(a[place], b[place], sign));
    this.filter(this.text || "");
  }

  filter(text) {
    this.text = text;
    this.shown = this.order.filter(matcher(text, this.columns));
    this.refill();
  }

  refill() {
    this.at = 0;
    this.table.tBodies[0].replaceChildren();
    this.fill();
  }

  fill() {
    const body = this.table.tBodies[0], until = Math.min(this.at + CHUNK, this.shown.length);
    for (; this.at < until; this.at += 1) {
      const row = this.shown[this.at];
      body.append(make("tr", { "data-place": this.at }, this.places.map((place, column) => this.cell(row[place], place, column))));
    }
    this.count.textContent = `${this.shown.length} of ${this.rows.length} runs`;
    this.more.hidden = this.at >= this.shown.length;
    this.more.textContent = `Show more (${this.shown.length - this.at} left)`;
  }

  cell(value, place, column) {
    const name = this.columns[place], css = this.numeric[place] ? "number" : null;
    if (column === 0) return make("td", {}, make("button", { type: "button", "aria-haspopup": "dialog" }, value || "open"));
    if (name === "fidelity" && value !== "ok") return make("td", {}, make("span", { class: "badge flag" }, value));
    if (name === "state" && value !== "done") return make("td", {}, make("span", { class: "badge fails" }, value));
    return make("td", { class: css, title: value.length > 40 ? value : null }, short(value));
  }
}

function rows(head, content) {
  return make("div", { class: head.length > 3 ? "scroll many" : "scroll", tabindex: "0" }, make("table", {},
    make("thead", {}, make("tr", {}, head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, content.map((row) => make("tr", {}, row.map((cell) => make("td", {}, words(cell))))))));
}

function words(value) {
  if (value === null || value === undefined || value === "") return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function flat(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[prefix, words(value)]];
  return Object.entries(value).flatMap(([key, item]) => flat(item, prefix ? `${prefix}.${key}` : key));
}

const dialog = document.getElementById("run");

async function openRun(set, columns, cells) {
  const row = Object.fromEntries(columns.map((name, place) => [name, cells[place]]));
  const detail = await unpack(`${set.id}-detail`);
  const own = { ...detail.shared, ...(detail.own[row.run_id] || {}) };
  const around = detail.provenance.runs[row.run_id] || {};
  const placed = (name) => (around[name] ?? null) === null ? null : detail.provenance[name][around[name]];
  const links = placed("links") || [];
  const from = { ...placed("surroundings"), ...placed("used") };
  const changed = Object.entries(own).map(([key, value]) => [key, value]);
  const rest = Object.entries(index.defaults).filter(([key]) => !(key in own));
  const numbers = columns.filter((name) => row[name] !== "").map((name) => {
    const [unit, meaning] = index.columns.runs[name] || ["", ""];
    return [name, row[name], unit, meaning];
  });
  const dates = Object.fromEntries(["started_at", "ended_at", "load_at_start"].map((key) => [key, around[key]]));
  const id = "run-title";
  dialog.setAttribute("aria-labelledby", id);
  dialog.replaceChildren(
    make("header", {}, make("h2", { id }, `Run ${row.run_id}: ${row.arm}, seed ${row.seed}, part ${row.part}`),
      make("button", { type: "button", onclick: () => dialog.close() }, "Close")),
    make("p", {}, `State: ${row.state}. `, row.error ? `Error: ${row.error}. ` : "",
      `Fidelity: ${row.fidelity}. `, row.fidelity_reason || ""),
    make("h3", {}, "Links: set against measured"),
    make("p", {}, `Set ${row.rate_mbit === "" ? "no limit" : `${row.rate_mbit} Mbit/s`}; worst link measured `,
      `${row.measured_rate_mbit || "not measured"} Mbit/s, round trip ${row.measured_rtt_ms || "not measured"} ms.`),
    links.length ? rows(["link", "set (Mbit/s)", "measured (Mbit/s)", "goodput (Mbit/s)", "delay set (ms)", "RTT measured (ms)", "within tolerance"],
      links.map((l) => [`${l.source} to ${l.destination}`, l.rate_mbit ?? "no limit", l.measured_rate_mbit, l.goodput_mbit,
        l.delay_ms, l.rtt_ms, l.ok === null ? "not measured" : l.ok ? "yes" : `no: ${l.reason}`])) : null,
    make("h3", {}, "Settings that are not the default"), rows(["setting", "value"], changed),
    make("details", {}, make("summary", {}, `Settings left at their default (${rest.length})`), rows(["setting", "value"], rest)),
    make("h3", {}, "Numbers"), rows(["column", "value", "unit", "what it is"], numbers),
    make("details", {}, make("summary", {}, "Manifest: machine, versions, source"), rows(["", ""], flat({ ...dates, ...from }))));
  dialog.showModal();
  dialog.scrollTop = 0;
}

function quoted(cell) {
  return /[",\n\r]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
}

async function download(button) {
  const { columns, cells } = await unpack(button.dataset.blob);
  const lines = [columns.map(quoted).join(",")];
  const count = cells.length ? cells[0].length : 0;
  for (let row = 0; row < count; row += 1) lines.push(cells.map((column) => quoted(column[row])).join(","));
  const url = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv;charset=utf-8" }));
  const link = make("a", { href: url, download: button.dataset.file });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

async function show(element) {
  if (element.dataset.figure) {
    element.innerHTML = await unpack(element.dataset.figure);
    element.style.aspectRatio = "auto";
  } else {
    const set = index.sets.find((found) => found.id === element.dataset.runs);
    new Grid(element, set, await unpack(`${set.id}-runs`), (columns, cells) => openRun(set, columns, cells));
  }
}

// What stands below the page's fold is unpacked when it comes near, or when the page is printed.
const waiting = new Set(document.querySelectorAll("[data-figure], [data-runs]"));
async function due(element) {
  if (waiting.delete(element)) await show(element);
}
const near = new IntersectionObserver((seen) => {
  for (const entry of seen) if (entry.isIntersecting) { near.unobserve(entry.target); due(entry.target); }
}, { rootMargin: "800px" });
waiting.forEach((element) => near.observe(element));
addEventListener("beforeprint", () => [...waiting].forEach(due));

document.querySelectorAll("table.sortable").forEach(sortableInPlace);
document.querySelectorAll("button[data-blob]").forEach((button) => button.addEventListener("click", () => download(button)));
document.querySelectorAll("button[data-state]").forEach((button) => button.addEventListener("click", () => {
  const on = button.getAttribute("aria-pressed") !== "true";
  document.querySelectorAll("button[data-state]").forEach((other) => other.setAttribute("aria-pressed", on && other === button));
  document.querySelectorAll("#overview tbody tr").forEach((row) => { row.hidden = on && row.dataset.state !== button.dataset.state; });
}));
document.documentElement.dataset.ready = "yes";
