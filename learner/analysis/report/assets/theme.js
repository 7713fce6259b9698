"use strict";
// The button that switches between light and dark, which begins with what the system says.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");

  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  function tell() {
    button.querySelector("span").textContent = dark() ? "Light" : "Dark";
    document.dispatchEvent(new Event("theme"));
  }

  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("rollmatch-theme", root.dataset.theme);
    } catch (refused) {
      // It then lasts as long as the page.
    }
    tell();
  });
  system.addEventListener("change", tell);
  tell();
})();
