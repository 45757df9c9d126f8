// The figures: what a mark says, and the explorer's step in the figure of the training.

/** A line with the tooltip of the mark that is pointed at, touched or reached by arrow keys. */
function setUpFigure(figure) {
  const chart = figure.querySelector("svg");
  const marks = [...chart.querySelectorAll("title")].map((title) => title.parentNode);
  if (!marks.length) return;
  const line = html("p", { class: "told", role: "status" });
  let chosen = marks[0];
  const tell = (mark) => {
    chosen.classList.remove("marked");
    mark.classList.add("marked");
    chosen = mark;
    line.textContent = mark.querySelector("title").textContent;
  };
  const middle = (mark) => {
    const box = mark.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  chart.setAttribute("tabindex", "0");
  chart.addEventListener("focus", () => tell(chosen));
  chart.addEventListener("pointerover", (event) => {
    const mark = marks.find((one) => one.contains(event.target));
    if (mark) tell(mark);
  });
  chart.addEventListener("keydown", (event) => {
    const [right, down] = directions[event.key] || [];
    if (right === undefined) return;
    const [x, y] = middle(chosen);
    const far = marks.map(middle).map(([toX, toY]) => {
      const ahead = (toX - x) * right + (toY - y) * down;
      return ahead > 0.5 ? ahead + 3 * (Math.abs((toX - x) * down) + Math.abs((toY - y) * right)) : Infinity;
    });
    const least = far.reduce((best, value, i) => (value < far[best] ? i : best), 0);
    if (far[least] < Infinity) tell(marks[least]);
    event.preventDefault();
  });
  figure.after(line);
}

const cursors = []; // {line, x(step)}
function setUpCursors() {
  const [first, last] = extent(views[0].steps);
  for (const span of document.querySelectorAll("[id^=training-steps] path")) {
    const box = span.getBBox(), line = svg("line", { class: "cursor", y1: box.y, y2: box.y + box.height });
    span.ownerSVGElement.append(line);
    cursors.push({ line, x: (step) => box.x + ((step - first) / (last - first || 1)) * box.width });
  }
  onFrame.push((step) => { for (const { line, x } of cursors) { line.setAttribute("x1", x(step)); line.setAttribute("x2", x(step)); } });
  const chart = document.querySelector("#training svg");
  if (!chart) return;
  chart.style.cursor = "pointer";
  chart.addEventListener("click", (event) => {
    const box = chart.querySelector("[id^=training-steps] path").getBoundingClientRect();
    showFrame(nearest(view().steps, first + ((event.clientX - box.x) / box.width) * (last - first)));
  });
}

settingUp.push(() => {
  document.querySelectorAll(".drawn figure").forEach(setUpFigure);
  setUpCursors();
  const table = document.querySelector("#heads-table table");
  if (table) setUpSorting(table);
});
