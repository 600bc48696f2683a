//! Exact attention with any mask on the CPU, forward and backward: a safe layer over the C library flash-dmattn.
//!
//! A tensor is a slice with a shape, C-contiguous. `flash_dmattn.h` says beside `fdm_tensors` which shapes and dtypes
//! a call takes. The library checks them before it reads an element, and what it refuses is an [`Error`].
//!
//! ```
//! use flash_dmattn::{forward, Inputs, Options, Outputs, View, ViewMut};
//! # fn main() -> Result<(), flash_dmattn::Error> {
//! let (q, k, v) = ([0.5f32; 12], [0.25f32; 12], [1f32, 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12.]);
//! let (mut out, mut lse) = ([0f32; 12], [0f32; 3]);
//! let shape = [1, 3, 1, 4]; // [B, S, H, D]
//! let (q, k) = (View::new(&q, &shape)?, View::new(&k, &shape)?);
//! let inputs = Inputs { q, k, v: View::new(&v, &shape)?, ..Inputs::default() };
//! let (o, l) = (ViewMut::new(&mut out, &shape)?, ViewMut::new(&mut lse, &[1, 1, 3])?);
//! let outputs = Outputs { out: o, lse: l, ..Outputs::default() };
//! forward(&inputs, outputs, &Options { causal: true, ..Options::default() })?;
//! assert_eq!(out[..4], v[..4]); // row 0 sees key 0 alone
//! # Ok(())
//! # }
//! ```
//!
//! A view borrows its slice:
//!
//! ```compile_fail,E0597
//! let view = { let data = vec![0f32; 4]; flash_dmattn::View::new(&data, &[4]) };
//! drop(view);
//! ```
pub use flash_dmattn_sys as sys;
use std::ffi::CStr;
use std::marker::PhantomData;
use std::os::raw::c_void;
use std::ptr::{null, null_mut};

/// Why a call failed: a status of the library, and a sentence that names the argument and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub status: sys::fdm_status,
    pub message: String,
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// A type of elements.
///
/// # Safety
/// Its size is that of `DTYPE`, and so is its alignment. Every value of `DTYPE` is one of it, and the other way round.
pub unsafe trait Element: Copy {
    const DTYPE: sys::fdm_dtype;
}

/// The bits of a float16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Float16(pub u16);

/// The bits of a bfloat16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct BFloat16(pub u16);

macro_rules! elements {
    ($($name:ty: $dtype:ident),*) => {$(
        // SAFETY: the type of that dtype.
        unsafe impl Element for $name {
            const DTYPE: sys::fdm_dtype = sys::$dtype;
        }
    )*};
}
elements!(f32: FDM_FLOAT32, Float16: FDM_FLOAT16, BFloat16: FDM_BFLOAT16, f64: FDM_FLOAT64);
elements!(bool: FDM_BOOL, i32: FDM_INT32);

/// A tensor that is read; the default is none.
#[derive(Clone, Copy, Debug, Default)]
pub struct View<'a>(Option<sys::fdm_tensor>, PhantomData<&'a ()>);

impl<'a> View<'a> {
    /// An error where `shape` is not one of `data.len()` elements.
    pub fn new<T: Element>(data: &'a [T], shape: &'a [i64]) -> Result<Self, Error> {
        tensor::<T>(data.as_ptr() as *mut c_void, data.len(), shape).map(|raw| View(Some(raw), PhantomData))
    }
}

/// A tensor that is written; the default is none.
#[derive(Debug, Default)]
pub struct ViewMut<'a>(Option<sys::fdm_tensor>, PhantomData<&'a mut ()>);

impl<'a> ViewMut<'a> {
    /// An error where `shape` is not one of `data.len()` elements.
    pub fn new<T: Element>(data: &'a mut [T], shape: &'a [i64]) -> Result<Self, Error> {
        tensor::<T>(data.as_mut_ptr() as *mut c_void, data.len(), shape).map(|raw| ViewMut(Some(raw), PhantomData))
    }
}

fn tensor<T: Element>(data: *mut c_void, length: usize, shape: &[i64]) -> Result<sys::fdm_tensor, Error> {
    let elements = shape.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent.try_into().ok()?));
    match (elements, shape.len().try_into()) {
        (Some(elements), Ok(ndim)) if elements == length => Ok(sys::fdm_tensor {
            data,
            device: sys::fdm_device_id { r#type: sys::FDM_CPU, index: 0 },
            ndim,
            dtype: unsafe { sys::fdm_data_type_of(T::DTYPE) }, // SAFETY: a function of a number.
            shape: shape.as_ptr() as *mut i64,
            strides: null_mut(),
            byte_offset: 0,
        }),
        _ => Err(Error {
            status: sys::FDM_ERROR_INVALID_ARGUMENT,
            message: format!("a slice has {length} elements; its shape {shape:?} must have as many"),
        }),
    }
}

/// The library writes what a tensor's `data` points to, never an `fdm_tensor`.
fn pointer(tensor: &Option<sys::fdm_tensor>) -> *mut sys::fdm_tensor {
    tensor.as_ref().map_or(null_mut(), |tensor| tensor as *const _ as *mut _)
}

macro_rules! tensors {
    ($($doc:literal $name:ident { $($field:ident)* } $view:ident)*) => {$(
        #[doc = $doc]
        #[derive(Debug, Default)]
        pub struct $name<'a> {
            $(pub $field: $view<'a>,)*
        }
        impl $name<'_> {
            fn put(&self, tensors: &mut sys::fdm_tensors) {
                $(tensors.$field = pointer(&self.$field.0);)*
            }
        }
    )*};
}
tensors! {
    "What a call reads; each field is that of `fdm_tensors`."
    Inputs { q k v mask bias interval_start interval_end cu_seqlens_q cu_seqlens_k sink } View
    "What the forward writes."
    Outputs { out lse lse_low } ViewMut
    "What the backward reads beside its inputs: results of the forward, and the gradients flowing in."
    Saved { out lse lse_low dout dlse } View
    "What the backward writes."
    Gradients { dq dk dv dbias dsink } ViewMut
}

/// The part of `fdm_options` that attention on the CPU has, with the same defaults.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    pub softmax_scale: Option<f64>,
    pub causal: bool,
    pub softcap: f64,
    pub window_left: Option<u32>,
    pub window_right: Option<u32>,
    pub num_threads: i32,
    pub family: Option<&'a CStr>,
    pub lse_without_sink: bool,
}

impl Options<'_> {
    fn raw(&self) -> sys::fdm_options {
        sys::fdm_options {
            has_softmax_scale: self.softmax_scale.is_some().into(),
            softmax_scale: self.softmax_scale.unwrap_or_default(),
            causal: self.causal.into(),
            softcap: self.softcap,
            window_left: self.window_left.map_or(-1, i64::from),
            window_right: self.window_right.map_or(-1, i64::from),
            num_threads: self.num_threads,
            family: self.family.map_or(null(), CStr::as_ptr),
            lse_without_sink: self.lse_without_sink.into(),
            ..Default::default()
        }
    }
}

/// Writes `outputs`, or leaves them as they were.
pub fn forward(inputs: &Inputs, outputs: Outputs, options: &Options) -> Result<(), Error> {
    let mut tensors = sys::fdm_tensors::default();
    inputs.put(&mut tensors);
    outputs.put(&mut tensors);
    // SAFETY: every view is borrowed until here and as long as its shape says. The library keeps no pointer.
    result(unsafe { sys::fdm_attention_forward(&tensors, &options.raw(), null()) })
}

/// Writes `gradients`, or leaves them as they were.
pub fn backward(inputs: &Inputs, saved: &Saved, gradients: Gradients, options: &Options) -> Result<(), Error> {
    let mut tensors = sys::fdm_tensors::default();
    inputs.put(&mut tensors);
    saved.put(&mut tensors);
    gradients.put(&mut tensors);
    // SAFETY: as in `forward`.
    result(unsafe { sys::fdm_attention_backward(&tensors, &options.raw(), null()) })
}

/// Writes `interval_start` and `interval_end` of the causal top-`window` keys, as `fdm_topk_intervals` describes them.
pub fn topk_intervals(bias: View, window: i64, seqlen_q: i64, start: ViewMut, end: ViewMut) -> Result<(), Error> {
    let (bias, start, end) = (pointer(&bias.0), pointer(&start.0), pointer(&end.0));
    // SAFETY: as in `forward`. The library allocates the workspace.
    result(unsafe { sys::fdm_topk_intervals(bias, null(), window, seqlen_q, start, end, null_mut(), 0, null_mut()) })
}

fn result(status: sys::fdm_status) -> Result<(), Error> {
    if status == sys::FDM_OK {
        return Ok(());
    }
    // SAFETY: a string that stays until this thread's next failing call.
    let message = unsafe { CStr::from_ptr(sys::fdm_last_error()) }.to_string_lossy().into_owned();
    Err(Error { status, message })
}
