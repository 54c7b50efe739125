"use strict";
// What every part of the page uses: labels, hovering, definitions, the contents.
const labels = JSON.parse(document.getElementById("labels").textContent);
const all = (query, root = document) => [...root.querySelectorAll(query)];
function make(tag, fields = {}, text) {
  const element = Object.assign(document.createElement(tag), fields);
  if (text !== undefined) element.textContent = text;
  return element;
}
function save(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const tip = document.getElementById("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = !text;
  if (!text) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18) + "px";
}
document.addEventListener("pointermove", (event) => {
  if (event.target.id === "tl") return;
  const at = event.target.closest?.("[data-tip]");
  showTip(at ? at.dataset.tip : "", event.clientX, event.clientY);
  const group = event.target.closest?.("[data-group]")?.dataset.group;
  for (const lit of all(".lit")) lit.classList.remove("lit");
  if (group) for (const same of all(`[data-group="${CSS.escape(group)}"]`)) same.classList.add("lit");
});

const definition = document.getElementById("definition");
let opener = null;
function closeDefinition() {
  if (definition.hidden) return;
  definition.hidden = true;
  opener?.focus();
}
document.addEventListener("click", (event) => {
  const term = event.target.closest("a.term");
  if (!term) { if (!definition.contains(event.target)) definition.hidden = true; return; }
  const entry = document.querySelector(term.getAttribute("href"));
  if (!entry) return;
  event.preventDefault();
  opener = term;
  document.getElementById("definition-term").textContent = entry.querySelector("dt").textContent;
  document.getElementById("definition-text").textContent = entry.querySelector("dd").textContent;
  definition.hidden = false;
  const box = term.getBoundingClientRect(), own = definition.getBoundingClientRect();
  definition.style.left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - own.width - 8)) + "px";
  definition.style.top = box.bottom + scrollY + 6 + "px";
  document.getElementById("definition-close").focus({ preventScroll: true });
});
document.getElementById("definition-close").addEventListener("click", closeDefinition);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") { closeDefinition(); showTip(""); } });

// Mark in the contents where the reader is.
const spy = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) {
    for (const link of all("nav a")) {
      if (link.getAttribute("href") === "#" + entry.target.id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }
}, { rootMargin: "-15% 0px -75% 0px" });
for (const section of all("main > section")) spy.observe(section);

// A link into the page opens what hides its target; print opens everything and closes it again.
let opened = [];
addEventListener("beforeprint", () => { opened = all("details:not([open])"); for (const part of opened) part.open = true; });
addEventListener("afterprint", () => { for (const part of opened) part.open = false; opened = []; });
