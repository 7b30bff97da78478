// Shows the page in a frame that has no access to the notebook. The address chooses head, query and key, as in a URL.

const render = ({ model, el }) => {
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts");
  frame.title = "regard";
  frame.style.cssText = "display:block;width:100%;border:0";
  let url = null;
  const size = () => {
    frame.style.height = `${model.get("height")}px`;
  };
  const open = () => {
    frame.src = `${url}#${model.get("address")}`;
  };
  const load = () => {
    if (url) URL.revokeObjectURL(url);
    url = URL.createObjectURL(new Blob([model.get("page")], { type: "text/html" }));
    open();
  };
  const followed = { "change:page": load, "change:address": open, "change:height": size };
  for (const [name, follow] of Object.entries(followed)) model.on(name, follow);
  size();
  load();
  el.append(frame);
  return () => {
    for (const [name, follow] of Object.entries(followed)) model.off(name, follow);
    URL.revokeObjectURL(url);
  };
};
export default { render };
