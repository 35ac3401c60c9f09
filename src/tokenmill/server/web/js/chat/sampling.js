// What can be set about how answers are drawn; the model's own values hold for what is not.

export const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: "any", hint: "0: always the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.001, max: 1, step: "any", hint: "the likeliest tokens that make up this share" },
  { name: "top_k", label: "Top k", min: 1, step: 1, hint: "only so many of the likeliest tokens" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any", hint: "at least this share of the likeliest one's probability" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, step: "any", hint: "1: none" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: "any", hint: "0: none" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: "any", hint: "0: none" },
  { name: "max_tokens", label: "Longest answer", min: 1, step: 1, hint: "in tokens" },
  { name: "seed", label: "Seed", min: 0, step: 1, hint: "the same seed, the same answer" },
];

/** What of a stranger's settings can be used. */
export function usable(given) {
  const found = {};
  for (const { name } of FIELDS) if (Number.isFinite(given?.[name])) found[name] = given[name];
  const stop = Array.isArray(given?.stop) ? given.stop.filter((text) => typeof text === "string" && text !== "") : [];
  if (stop.length) found.stop = stop;
  return found;
}
