// The parts of D3 that the page draws with; `npm run build` makes d3.min.js of them.
export { axisBottom, axisLeft, axisTop } from "d3-axis";
export { easeCubicInOut } from "d3-ease";
export { format } from "d3-format";
export { interpolateNumber, interpolateRgbBasis } from "d3-interpolate";
export { scaleLinear } from "d3-scale";
export { pointer, select } from "d3-selection";
export { area, curveStepAfter, line } from "d3-shape";
export { timer } from "d3-timer";
export { zoom, zoomIdentity, zoomTransform } from "d3-zoom";
