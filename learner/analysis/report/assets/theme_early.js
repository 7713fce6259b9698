"use strict";
// Before anything is painted: the theme that was chosen last on this machine.
try {
  const chosen = localStorage.getItem("rollmatch-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch (refused) {
  // A file that is opened from a disk may have no storage.
}
