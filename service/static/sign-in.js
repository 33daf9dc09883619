// Asks for the token of the service; the page is loaded anew with it.

import { hasToken, keepToken } from "./api.js";
import { showLocked } from "./connection.js";
import { byId } from "./dom.js";

export function signIn() {
  const form = byId("sign-in");
  const field = byId("token");
  if (!form.hidden) return;
  form.hidden = false;
  byId("panels").hidden = byId("notices").hidden = true;
  showLocked();
  if (hasToken()) byId("token-problem").textContent = "That is not the token of this service.";
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    keepToken(field.value.trim());
    location.reload();
  });
  field.focus();
}
