// What scrolls by itself is reached with the keyboard, too: long lines of code, wide tables.
const reach = () => document.querySelectorAll("article pre, article table").forEach((one) => {
  if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
  else one.removeAttribute("tabindex");
});
addEventListener("load", reach);
addEventListener("resize", reach);
