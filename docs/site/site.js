// The theme puts each copy button into a navigation landmark, all without a name: a list of landmarks is no use then.
new MutationObserver(() => {
  for (const bar of document.querySelectorAll("nav.md-code__nav")) bar.role = "none";
}).observe(document.body, { childList: true, subtree: true });
