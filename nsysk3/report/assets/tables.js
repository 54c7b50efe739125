// Tables: sorting, filtering, CSV, and the way from a row to its place in the timeline.
const FILTER_FROM = 9;
const rawOf = (cell) => cell.dataset.v ?? cell.textContent.trim();
function isMissing(cell) { return cell.querySelector(".nm") !== null; }

function compareCells(a, b) {
  if (isMissing(a) !== isMissing(b)) return isMissing(a) ? 1 : -1;
  const x = rawOf(a), y = rawOf(b), nx = Number(x), ny = Number(y);
  return x !== "" && y !== "" && !Number.isNaN(nx) && !Number.isNaN(ny) ? nx - ny : x.localeCompare(y);
}

function sortable(table) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = make("button", { type: "button", className: "sort" }, "↕");
    button.setAttribute("aria-label", `${labels.sort} ${head.textContent.trim()}`);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "descending" || (!head.hasAttribute("aria-sort") && !head.classList.contains("n"));
      for (const other of heads) { other.removeAttribute("aria-sort"); other.querySelector(".sort").textContent = "↕"; }
      head.setAttribute("aria-sort", down ? "ascending" : "descending");
      button.textContent = down ? "↑" : "↓";
      const rows = [...body.rows];
      // Null stays last whichever way the others go.
      rows.sort((a, b) => {
        const x = a.cells[column], y = b.cells[column], order = compareCells(x, y);
        return isMissing(x) || isMissing(y) || down ? order : -order;
      });
      body.append(...rows);
    });
    head.append(" ", button);
  });
}

function csvOf(table) {
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [[...table.tHead.rows[0].cells].map((cell) => cell.dataset.key)];
  for (const row of table.tBodies[0].rows) {
    if (!row.hidden) lines.push([...row.cells].map((cell) => (isMissing(cell) ? "" : rawOf(cell))));
  }
  // A cell that a spreadsheet would run as a formula is kept text.
  const safe = (text) => (/^[=+@\t]|^-[^\d.]/.test(text) ? "'" + text : text);
  return lines.map((line) => line.map((text) => quote(safe(text))).join(",")).join("\r\n") + "\r\n";
}

for (const box of all(".tab")) {
  const table = box.querySelector("table"), body = table.tBodies[0];
  const tools = make("div", { className: "tools" });
  // Before sorting gives every row a way out of its first cell's text.
  for (const cell of table.querySelectorAll("tbody tr > :first-child")) cell.dataset.v ??= cell.textContent.trim();
  if (body.rows.length >= FILTER_FROM) {
    const field = make("input", { type: "search" });
    const label = make("label", {}, labels.filter + " ");
    const said = make("span", { role: "status" });
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase();
      let left = 0;
      for (const row of body.rows) { row.hidden = !row.textContent.toLowerCase().includes(wanted); left += !row.hidden; }
      said.textContent = wanted ? `${left} ${labels.rows_left}` : "";
    });
    label.append(field);
    tools.append(label, said);
  }
  if (body.rows.length > 1) sortable(table);
  const csv = make("button", { type: "button", className: "small" }, labels.csv);
  csv.setAttribute("aria-label", `${labels.csv}: ${table.caption.textContent}`);
  csv.addEventListener("click", () => save(`nsysk3-${box.dataset.table}.csv`, new Blob([csvOf(table)], { type: "text/csv" })));
  tools.append(csv);
  box.prepend(tools);
}
