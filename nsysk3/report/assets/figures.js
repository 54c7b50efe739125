// Figures leave the page as SVG or PNG, with the colours of the theme they are seen in.
const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "font-size", "font-weight", "font-family", "paint-order"];

function standalone(figure) {
  const source = all("svg.draw", figure).find((svg) => svg.getBoundingClientRect().width > 0);
  const copy = source.cloneNode(true), box = source.viewBox.baseVal;
  const defs = document.getElementById("patterns"), pad = 14, head = 30;
  const inline = (from, to) => {
    const style = getComputedStyle(from);
    for (const name of KEPT) {
      const value = style.getPropertyValue(name);
      // A page-relative url(#pattern) must stay relative to the drawing.
      if (value && value !== "none" || name === "fill") to.setAttribute(name, value.replace(/url\("[^"#]*#/, 'url("#'));
    }
    to.removeAttribute("data-tip"); to.removeAttribute("data-group"); to.removeAttribute("class");
    for (let i = 0; i < from.children.length; i++) inline(from.children[i], to.children[i]);
  };
  for (let i = 0; i < source.children.length; i++) inline(source.children[i], copy.children[i]);
  const marks = defs.cloneNode(true);
  for (let i = 0; i < defs.children.length; i++) for (let j = 0; j < defs.children[i].children.length; j++) inline(defs.children[i].children[j], marks.children[i].children[j]);
  const space = "http://www.w3.org/2000/svg", page = getComputedStyle(document.body);
  const part = (tag, fields, text = "") => {
    const element = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(fields)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  };
  const width = box.width + 2 * pad, height = box.height + 2 * pad + head;
  const out = part("svg", { xmlns: space, width, height, viewBox: `${-pad} ${-pad - head} ${width} ${height}` });
  out.append(part("rect", { x: -pad, y: -pad - head, width, height, fill: getComputedStyle(figure).backgroundColor }));
  out.append(part("text", { x: 0, y: -head + 10, fill: page.color, "font-family": page.fontFamily, "font-size": 15, "font-weight": 650 }, figure.querySelector("h3").textContent));
  out.append(marks, ...copy.childNodes);
  return { text: new XMLSerializer().serializeToString(out), width, height };
}

async function png(figure) {
  const { text, width, height } = standalone(figure), image = new Image();
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  await image.decode();
  const canvas = make("canvas", { width: width * 2, height: height * 2 }), pen = canvas.getContext("2d");
  pen.scale(2, 2);
  pen.drawImage(image, 0, 0, width, height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

for (const figure of all("figure.fig:not(.timeline)")) {
  const name = figure.id.replace("fig-", "nsysk3-"), box = make("div", { className: "export" });
  const title = figure.querySelector("h3").textContent;
  const offer = (label, act) => {
    const button = make("button", { type: "button", className: "small" }, label);
    button.setAttribute("aria-label", `${label}: ${title}`);
    button.addEventListener("click", act);
    box.append(button);
  };
  offer(labels.svg, () => save(name + ".svg", new Blob([standalone(figure).text], { type: "image/svg+xml" })));
  offer(labels.png, async () => save(name + ".png", await png(figure)));
  figure.querySelector("figcaption").append(box);
}
