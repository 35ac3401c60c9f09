// What can be set about how answers are drawn. For what is not, the model's defaults hold, or `unset` says what.

export const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: "any", hint: "0 is greedy" },
  { name: "top_p", label: "Top p", min: 0.001, max: 1, step: "any", hint: "total probability of the tokens to sample from" },
  { name: "top_k", label: "Top k", min: 1, step: 1, hint: "number of tokens to sample from" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any", hint: "minimum probability, relative to the top token" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, step: "any", hint: "1 is off" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: "any", hint: "0 is off" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: "any", hint: "0 is off" },
  { name: "max_tokens", label: "Longest answer", min: 1, step: 1, hint: "in tokens, within the context", unset: "no limit" },
  { name: "seed", label: "Seed", min: 0, step: 1, hint: "the same seed repeats an answer", unset: "random" },
];

/** What of a stranger's settings can be used. */
export function usable(given) {
  const found = {};
  for (const { name } of FIELDS) if (Number.isFinite(given?.[name])) found[name] = given[name];
  const stop = Array.isArray(given?.stop) ? given.stop.filter((text) => typeof text === "string" && text !== "") : [];
  if (stop.length) found.stop = stop;
  return found;
}
