// "-100" is a number that people look for; to the search engine the sign would mean "without 100".
document.addEventListener("DOMContentLoaded", () => {
  const field = document.querySelector("[data-md-component=search-query]");
  const { get, set } = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value");
  Object.defineProperty(field, "value", {
    get() {
      return get.call(this).replace(/(^|\s)-(?=\w)/g, "$1");
    },
    set,
  });
});
