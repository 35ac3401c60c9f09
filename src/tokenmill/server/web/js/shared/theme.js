// Light, dark, or as the system has it.

const NAME = "tokenmill.theme";
export const THEMES = ["system", "light", "dark"];

export function theme() {
  const stored = localStorage.getItem(NAME);
  return THEMES.includes(stored) ? stored : "system";
}

export function setTheme(value) {
  localStorage.setItem(NAME, value);
  apply();
}

function apply() {
  const chosen = theme();
  document.documentElement.dataset.theme = chosen;
  window.dispatchEvent(new Event("themechange"));
}

apply();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
