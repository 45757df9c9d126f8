// Ranks the sections of the site (sections.js) by the words of a query. The stemmer and the stop words are Sphinx's
// (language_data.js).
const stemmer = new Stemmer(), stems = new Map(), ignored = new Set([...stopwords, "can", "get", "use", "using", "jattn"]);
const stem = (word) => stems.get(word) ?? stems.set(word, stemmer.stemWord(word)).get(word);
// "SlidingWindow" and "sliding_window" are two words, and one.
const split = (text) => text.match(/[\p{L}\p{N}_]+/gu)?.flatMap((name) => {
  const parts = name.match(/\p{Lu}?[\p{Ll}\p{N}]+|\p{Lu}+(?!\p{Ll})|\p{N}+/gu) ?? [];
  return parts.length > 1 ? [...parts, parts.join("")] : parts;
}) ?? [];
const terms = (text) => split(text).map((word) => word.toLowerCase()).filter((word) => !ignored.has(word)).map(stem);

const average = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
const sections = SITE.sections.map((section) => {
  const counts = new Map(), list = terms(section.text);
  for (const term of list) counts.set(term, (counts.get(term) ?? 0) + 1);
  return { ...section, counts, length: list.length, headingTerms: new Set(terms(section.heading)),
    pageTerms: new Set(terms(section.page)), phrases: section.words.map((words) => new Set(terms(words))),
    topic: new Set(terms(section.heading.split(":")[0])) }; // of "Long sequences: memory and speed", long sequences
});
const meanLength = average(sections.map((section) => section.length));
const synonyms = new Map();
for (const group of SITE.synonyms) for (const word of group) {
  const others = group.filter((other) => other !== word).map(stem);
  synonyms.set(stem(word), [...(synonyms.get(stem(word)) ?? []), ...others]);
}
const holds = (section, term) => section.counts.has(term) || section.headingTerms.has(term) || section.pageTerms.has(term)
  || section.phrases.some((phrase) => phrase.has(term));
const rarities = new Map();
const rarity = (term) => {
  if (!rarities.has(term)) {
    const many = sections.filter((section) => holds(section, term)).length;
    rarities.set(term, many ? Math.log(1 + sections.length / many) : Math.log(1 + sections.length));
  }
  return rarities.get(term);
};

// How well a section answers one term: its text adds up to 1 (BM25), its page's title 1, its heading or a phrase 3.
const match = (section, term) => {
  const count = section.counts.get(term) ?? 0;
  const text = count / (count + 0.4 + 0.8 * section.length / meanLength);
  const named = section.headingTerms.has(term) || section.phrases.some((phrase) => phrase.has(term));
  return text + (section.pageTerms.has(term) ? 1 : 0) + (named ? 3 : 0);
};
const score = (section, asked) => {
  let sum = 0, met = 0, all = 0;
  for (const term of asked) {
    const best = Math.max(match(section, term), ...(synonyms.get(term) ?? []).map((other) => 0.6 * match(section, other)));
    sum += rarity(term) * best;
    met += best ? rarity(term) : 0;
    all += rarity(term);
  }
  // A heading or a phrase that holds what was asked, and little else, is the answer.
  const like = Math.max(...[section.headingTerms, section.topic, ...section.phrases].map((name) => {
    const common = asked.filter((term) => name.has(term)).length;
    return common / asked.length * common / Math.max(name.size, 1);
  }));
  return (sum + 3 * like * all) * (met / all) ** 2;
};

const excerpt = (section, asked) => {
  const words = section.text.split(" "), wanted = new Set(asked);
  const hits = words.map((word) => terms(word).some((term) => wanted.has(term)));
  const start = Math.max(0, hits.indexOf(true) - 8);
  const line = document.createElement("p");
  words.slice(start, start + 32).forEach((word, i) => line.append(hits[start + i]
    ? Object.assign(document.createElement("mark"), { textContent: word }) : word, " "));
  return line;
};
const show = (query) => {
  const asked = [...new Set(terms(query))], list = document.getElementById("search-results");
  const found = asked.length ? sections.map((section) => [score(section, asked), section]).filter(([points]) => points > 0) : [];
  found.sort(([first], [second]) => second - first);
  list.replaceChildren(...found.slice(0, 20).map(([, section]) => {
    const item = document.createElement("li"), link = document.createElement("a");
    link.href = section.at;
    link.textContent = section.page ? `${section.heading} (${section.page})` : section.heading;
    item.append(link, excerpt(section, asked));
    return item;
  }));
  document.getElementById("search-count").textContent =
    !query ? "" : found.length ? `${found.length} sections, the best first.` : "Nothing holds these words.";
};
const field = document.getElementById("search-words");
field.value = new URLSearchParams(location.search).get("q") ?? "";
field.addEventListener("input", () => show(field.value));
document.getElementById("search-form").addEventListener("submit", (event) => event.preventDefault());
show(field.value);
